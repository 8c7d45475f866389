"""Rooms keep to themselves: who may import whom, and who alone may touch names, files, shared memory and threads.

The sources are read, never run. Each rule is a function of (room, syntax tree) that yields violations; the second half
of this file plants one violation per rule and expects it to be found.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "easyckpt"
TOP = "the package itself"  # easyckpt/__init__.py and __main__.py

BASE = {"errors", "failpoints", "version"}
BELOW = BASE | {"format"}
TIERS = BELOW | {"memory", "distributed", "storage"}
ROOMS_BELOW_SAVING = TIERS | {"state", "catalog", "verification", "config", "events", "event_kinds"}
ENGINE = {
    "engine",
    "ending",
    "farewell",
    "opening",
    "wiring",
    "dialects",
    "ground",
    "prospect",
    "framework",
}  # the Checkpointer, how it ends, how it puts the rooms together
LOOKING = {
    "contents",
    "comparison",
    "tensorfiles",
    "exporting",
}  # into checkpoints, for people: the engine does not need them
ENGINE_AND_BELOW = ROOMS_BELOW_SAVING | {"saving", "loading", "config_sources"} | ENGINE

#: room -> what it may import besides itself. Imports go one way:
#: integrations -> engine -> saving | loading -> memory, distributed, storage -> format, and state stands beside format.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "version": set(),
    "failpoints": set(),
    "format": {"errors"},
    "state": BELOW,
    "config": BELOW,
    "config_sources": BELOW | {"config"},
    "settings": BELOW | {"config"},
    "event_kinds": BELOW,
    "events": BELOW | {"event_kinds"},
    "memory": BELOW,
    "distributed": BELOW,
    "storage": BELOW,
    "catalog": BELOW | {"storage"},
    "auditing": BELOW | {"storage", "state", "config", "strangers"},
    "strangers": BELOW | {"state"},
    "verification": BELOW | {"storage", "catalog"},
    "contents": ROOMS_BELOW_SAVING | {"loading"},
    "tensorfiles": BELOW | {"contents", "state", "storage", "memory"},
    "pieces": BELOW | {"contents", "storage"},
    "tensor_comparison": BELOW | {"contents", "pieces"},
    "comparison": BELOW | {"storage", "catalog", "contents", "tensor_comparison"},
    "exporting": BELOW | {"storage", "catalog", "contents", "pieces", "exporting_torch"},
    "exporting_torch": BELOW | {"storage"},
    "saving": ROOMS_BELOW_SAVING,
    "loading": ROOMS_BELOW_SAVING,
    **{
        part: ROOMS_BELOW_SAVING | {"saving", "loading", "settings", "config_sources", "auditing"} | ENGINE
        for part in ENGINE
    },
    "integrations": ENGINE_AND_BELOW | {TOP, "exporting_torch", "settings"},
    "cli": ENGINE_AND_BELOW | LOOKING | {"auditing"},  # whose notes it reads
    TOP: ENGINE_AND_BELOW | {"cli"},
}

#: Names of files of a root, and of files in shared memory.
KNOW_NAMES = ("format/layout.py", "format/memory_names.py", "format/trainer_names.py")
FILE_NAME = re.compile(
    r"\.safetensors\b|\b(manifest|easyckpt|lease)\.json\b|\b(events|metrics)\.jsonl\b|\brank-|\.tmp\b|\.trash\b|\.stale\b"
    r"|^\.?step-|/step-|^easyckpt-$|^(latest|pins)$|\.owner$"
)
FILE_CALLS = {
    "open", "os.open", "os.rename", "os.replace", "os.unlink", "os.remove", "os.rmdir", "os.mkdir", "os.makedirs",
    "os.link", "os.symlink", "os.truncate", "os.scandir", "io.open", "tempfile.mkdtemp", "tempfile.NamedTemporaryFile",
    "shutil.rmtree", "shutil.copy", "shutil.copytree", "shutil.move",
}  # fmt: skip
PATH_METHODS = {
    "write_bytes",
    "write_text",
    "read_bytes",
    "read_text",
    "unlink",
    "rmdir",
    "mkdir",
    "touch",
    "rename",
    "open",
}
SHARED_MEMORY_MODULES = ("multiprocessing.shared_memory", "_posixshmem", "posix_ipc")
THREAD_CALLS = {
    "Thread",
    "Timer",
    "ThreadPoolExecutor",
    "ProcessPoolExecutor",
    "Process",
    "Popen",
    "fork",
    "start_new_thread",
}
PICKLE_MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}

#: (module, rule) -> why it is no violation. Every entry is a decision; an entry that no longer applies fails a test.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("config_sources.py", "files"): "reads the user's YAML, which is not in the root",
    ("events.py", "files"): "writes the user's log file, which is not in the root",
    ("cli/output.py", "files"): "the null device takes the place of a pipe that nobody reads any more",
    ("storage/localfile.py", "shared_memory"): "maps its own probe file to ask whether it is in the page cache",
    ("tensorfiles.py", "no_pickle"): "users' .pth files, read with weights_only: tensors and plain values, no code",
    ("exporting_torch.py", "no_pickle"): "a .pth state_dict is torch.save's format; it is written, never read",
    ("integrations/transformers/stock.py", "names"): "the Trainer's own names of files, in checkpoints that it wrote",
    (
        "integrations/transformers/stock.py",
        "no_pickle",
    ): "the Trainer's own pickles, read with weights_only and the arrays of NumPy's generator: no code",
    ("cli/audit/runs.py", "threads"): "runs the user's command",
    ("cli/audit/runs.py", "files"): "makes and removes the roots of its own runs as a whole, and keeps what they print",
    ("failpoints.py", "files"): "tests' hold files",
    ("integrations/transformers/scratch.py", "files"): "directories of the process's own, none of it is in the root",
    (
        "integrations/transformers/apart.py",
        "files",
    ): "the directory that the program itself writes into, in its own way",
    (
        "integrations/transformers/mirror.py",
        "files",
    ): "what the program does with files of its own in that directory, done where they are",
    (
        "integrations/transformers/plan.py",
        "no_pickle",
    ): "files of the framework are torch.save's; written, never read",
}


def room_of(module: str) -> str:
    """The room of a module given by its path below the package, e.g. ``saving/writer.py``."""
    first = module.split("/", maxsplit=1)[0].removesuffix(".py")
    return TOP if first in ("__init__", "__main__") else first


def sources() -> dict[str, ast.Module]:
    """Every module of the package and the integrations, parsed; Path.rglob does not follow the link by itself."""
    paths = {*PACKAGE.rglob("*.py"), *(PACKAGE / "integrations").rglob("*.py")}
    return {str(p.relative_to(PACKAGE)): ast.parse(p.read_text("utf-8")) for p in sorted(paths)}


def imported(module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of each import, those in functions and under TYPE_CHECKING too."""
    package = ["easyckpt", *module.split("/")[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{prefix}.{alias.name}"


def without_typing_blocks(tree: ast.Module) -> ast.Module:
    """The module without what stands directly below ``if TYPE_CHECKING:`` at its top: that never runs."""
    body = [n for n in tree.body if not (isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")]
    return ast.Module(body=body, type_ignores=[])


def called(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name as written) of each call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func)


def strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of each string constant but docstrings: lone strings are documentation."""
    documentation = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.lineno, node.value


def one_way(module: str, tree: ast.Module) -> Iterator[str]:
    room = room_of(module)
    allowed = MAY_IMPORT.get(room)
    if allowed is None:
        yield f"{module}: {room} is a room that MAY_IMPORT does not know"
        return
    for line, name in imported(module, tree):
        parts = name.split(".")
        if parts[0] != "easyckpt":
            continue
        target = parts[1] if len(parts) > 1 else ""
        if target not in MAY_IMPORT:
            target = TOP  # `import easyckpt`, or a name out of its __init__
        if target not in (room, *allowed):
            yield f"{module}:{line}: {room} imports {name}"


def names(module: str, tree: ast.Module) -> Iterator[str]:
    if module in KNOW_NAMES:
        return
    for line, text in strings(tree):
        if FILE_NAME.search(text):
            yield f"{module}:{line}: {text!r} looks like a file name; only {KNOW_NAMES} know names"


def files(module: str, tree: ast.Module) -> Iterator[str]:
    if room_of(module) in ("storage", "memory"):
        return
    for line, name in called(tree):
        receiver, _, method = name.rpartition(".")
        of_a_path = method in PATH_METHODS and ("path" in receiver.lower() or receiver.endswith(")"))
        if name in FILE_CALLS or of_a_path:
            yield f"{module}:{line}: {name}() touches files; storage/ does that"


def shared_memory(module: str, tree: ast.Module) -> Iterator[str]:
    if room_of(module) == "memory":
        return
    for line, text in strings(tree):
        if text.startswith("/dev/shm"):
            yield f"{module}:{line}: names shared memory; memory/ does that"
    for line, name in imported(module, tree):
        if name.startswith(SHARED_MEMORY_MODULES):
            yield f"{module}:{line}: imports {name}; memory/ does that"
    for node in ast.walk(tree):  # mmap(-1, ...) is private memory, such as an aligned buffer
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "mmap.mmap" and ast.unparse(node.args[0]) != "-1":
            yield f"{module}:{node.lineno}: maps a file; memory/ does that"


def threads(module: str, tree: ast.Module) -> Iterator[str]:
    if room_of(module) in ("saving", "memory"):
        return
    for line, name in called(tree):
        if name.rpartition(".")[2] in THREAD_CALLS:
            yield f"{module}:{line}: {name}() starts background work; saving/ and memory/ do that"


def no_pickle(module: str, tree: ast.Module) -> Iterator[str]:
    for line, name in imported(module, tree):
        if any(name == m or name.startswith(m + ".") for m in PICKLE_MODULES):
            yield f"{module}:{line}: imports {name}"
    for line, name in called(tree):
        if name in ("torch.load", "torch.save", "eval", "exec", "yaml.load"):
            yield f"{module}:{line}: {name}() can run code out of a file"


def pure(module: str, tree: ast.Module) -> Iterator[str]:
    """format/ says what bytes mean: it opens nothing and starts nothing."""
    if room_of(module) != "format":
        return
    for line, name in imported(module, without_typing_blocks(tree)):
        if name.split(".")[0] in ("os", "io", "threading", "subprocess", "socket", "shutil", "tempfile", "mmap"):
            yield f"{module}:{line}: format/ is pure and must not import {name}"


RULES = {rule.__name__: rule for rule in (one_way, names, files, shared_memory, threads, no_pickle, pure)}


def violations(rule: str, modules: dict[str, ast.Module]) -> list[str]:
    return [
        found
        for module, tree in modules.items()
        if (module, rule) not in EXCEPTIONS
        for found in RULES[rule](module, tree)
    ]


@pytest.mark.parametrize("rule", RULES)
def test_the_rooms_keep_the_rule(rule):
    assert violations(rule, sources()) == []


def test_every_exception_is_still_needed():
    modules = sources()
    idle = [key for key in EXCEPTIONS if not list(RULES[key[1]](key[0], modules[key[0]]))]
    assert idle == []


def test_integrations_are_read_too():
    assert "integrations/megatron/__init__.py" in sources()


PLANTED = [
    ("one_way", "saving/writer.py", "from easyckpt.loading import reader"),
    ("one_way", "loading/reader.py", "import easyckpt.saving.commit"),
    ("one_way", "loading/reader.py", "from ..saving import commit"),
    ("one_way", "format/image.py", "def f():\n    from easyckpt.storage import base"),
    ("one_way", "format/image.py", "from easyckpt import state"),
    ("one_way", "memory/slot.py", "from easyckpt import Checkpointer"),
    ("one_way", "storage/lease.py", "from easyckpt.memory.arena import OwnerLock"),
    ("one_way", "state/rng.py", "from easyckpt.saving import staging"),
    ("one_way", "engine.py", "import easyckpt.integrations.megatron"),
    ("one_way", "engine.py", "from easyckpt.cli import main"),
    ("one_way", "attic/old.py", ""),
    ("names", "saving/commit.py", "name = 'manifest.json'"),
    ("names", "saving/commit.py", "name = f'step-{step:08d}'"),
    ("names", "saving/writer.py", "path = directory + '/rank-00000.safetensors'"),
    ("names", "memory/arena.py", "name = f'easyckpt-{user}'"),
    ("names", "format/manifest.py", "NAME = 'manifest.json'"),
    ("files", "saving/commit.py", "import os\nos.rename(a, b)"),
    ("files", "loading/reader.py", "with open(name, 'rb') as f: pass"),
    ("files", "engine.py", "pathlib.Path(name).write_text('x')"),
    ("files", "engine.py", "path.unlink()"),
    ("shared_memory", "engine.py", "directory = '/dev/shm'"),
    ("shared_memory", "loading/reader.py", "mmap.mmap(descriptor, 4096)"),
    ("shared_memory", "saving/staging.py", "from multiprocessing import shared_memory"),
    ("threads", "distributed/rendezvous.py", "import threading\nthreading.Thread(target=f)"),
    ("threads", "engine.py", "ThreadPoolExecutor(1)"),
    ("threads", "storage/lease.py", "os.fork()"),
    ("no_pickle", "format/codec.py", "import pickle"),
    ("no_pickle", "loading/reader.py", "torch.load(name)"),
    ("pure", "format/codec.py", "import os"),
]


@pytest.mark.parametrize(("rule", "module", "source"), PLANTED)
def test_a_planted_violation_is_found(rule, module, source):
    assert violations(rule, {module: ast.parse(source)}) != []


@pytest.mark.parametrize(
    ("rule", "module", "source"),
    [
        ("one_way", "saving/writer.py", "from easyckpt.memory import slot"),
        ("one_way", "engine.py", "from easyckpt.saving import writer\nfrom easyckpt.loading import reader"),
        ("one_way", "integrations/megatron/__init__.py", "import easyckpt"),
        ("one_way", "cli/verify.py", "from easyckpt import catalog"),
        ("names", "saving/commit.py", '"""Writes manifest.json."""'),
        ("names", "saving/commit.py", "message = 'the step went back'"),
        ("files", "saving/commit.py", "self.storage.rename(a, b)"),
        ("shared_memory", "storage/localfile.py", "import mmap\nmmap.mmap(-1, 4096)"),
        ("pure", "format/codec.py", "if TYPE_CHECKING:\n    import mmap"),
        ("threads", "saving/worker.py", "threading.Thread(target=f)"),
    ],
)
def test_what_is_allowed_is_not_found(rule, module, source):
    assert violations(rule, {module: ast.parse(source)}) == []

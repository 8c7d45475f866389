"""Private names of transformers and accelerate: which are used, where, and that each supported major version has them.

A name that is used anywhere else, or is not in the table, fails here: what rests on it has to be read again for each
new version.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainers.launch import VERSIONS, python_of

PACKAGE = Path(__file__).resolve().parent.parent / "easyckpt"
INTEGRATIONS = PACKAGE / "integrations"
PRIVATE = re.compile(r"_[a-z]\w*")
#: Its methods stand in the place of the Trainer's, under the same names.
WRAPPER = "transformers/wrapper.py"
#: As the two packages have them.
SOURCES = ("transformers/trainer.py", "accelerate/accelerator.py", "accelerate/data_loader.py")

TABLE: dict[str, set[str]] = {
    # accelerate's
    "_custom_objects": {"accelerate/prepared.py"},
    "_is_accelerate_prepared": {"accelerate/loaders.py"},
    "_models": {"accelerate/prepared.py"},
    "_optimizers": {"accelerate/prepared.py"},
    "_schedulers": {"accelerate/prepared.py"},
    # the Trainer's
    "_evaluate": {WRAPPER},
    "_get_output_dir": {"transformers/overridden.py", "transformers/synchronous.py"},
    "_globalstep_last_logged": {"transformers/carried_loss.py", "transformers/progress.py"},
    "_inner_training_loop": {"transformers/overridden.py", WRAPPER},
    "_load_best_model": {"transformers/overridden.py", WRAPPER},
    "_load_callback_state": {"transformers/overridden.py", WRAPPER},
    "_load_from_checkpoint": {"transformers/overridden.py", WRAPPER},
    "_load_optimizer_and_scheduler": {"transformers/overridden.py", WRAPPER},
    "_load_rng_state": {"transformers/overridden.py", WRAPPER},
    "_load_scaler": {"transformers/overridden.py", WRAPPER},
    "_maybe_log_save_evaluate": {"transformers/overridden.py", WRAPPER},
    "_push_from_checkpoint": {"transformers/saves.py"},
    "_rotate_checkpoints": {"transformers/overridden.py"},
    "_run_epoch": {"transformers/overridden.py", WRAPPER},
    "_save": {"transformers/versions.py"},
    "_save_checkpoint": {"transformers/overridden.py", "transformers/synchronous.py", WRAPPER},
    "_save_optimizer_and_scheduler": {"transformers/overridden.py"},
    "_save_rng_state": {"transformers/overridden.py"},
    "_save_scaler": {"transformers/overridden.py"},
    "_save_tpu": {"transformers/overridden.py"},
    "_sorted_checkpoints": {"transformers/overridden.py"},
    "_total_loss_scalar": {"transformers/carried_loss.py", "transformers/progress.py", "transformers/versions.py"},
    "_tr_loss": {"transformers/versions.py"},
    "_train_batch_size": {"transformers/run.py"},
}
#: Not in each version; nothing is missed where they are not.
COMES_AND_GOES = {"_rotate_checkpoints", "_run_epoch", "_save_tpu", "_sorted_checkpoints", "_tr_loss"}
#: Of torch and NumPy.
OTHERS = {"_buffers", "_growth_tracker", "_non_persistent_buffers_set", "_reconstruct"}


def test_they_are_used_where_the_table_says():
    trees = {str(path.relative_to(INTEGRATIONS)): parsed(path) for path in INTEGRATIONS.rglob("*.py")}
    engine = [parsed(path) for path in PACKAGE.rglob("*.py")]
    ours = {name for tree in (*trees.values(), *engine) for name in defined(tree, methods=tree is not trees[WRAPPER])}
    found = defaultdict(set)
    for module, tree in trees.items():
        for name in used(tree):
            if PRIVATE.fullmatch(name) and name not in OTHERS and (name in TABLE or name not in ours):
                found[name].add(module)
    assert found == TABLE


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def defined(tree: ast.Module, *, methods: bool) -> Iterator[str]:
    """Names of functions, classes, and of what objects of our own hold."""
    functions = tree.body if not methods else ast.walk(tree)
    yield from (node.name for node in functions if isinstance(node, (ast.FunctionDef, ast.ClassDef)))
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "self.__dict__.update":
            yield from (str(keyword.arg) for keyword in node.keywords)


def used(tree: ast.Module) -> Iterator[str]:
    """Attributes, functions, and names as text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.mark.parametrize("version", VERSIONS)
def test_each_version_has_them(version):
    where = "import importlib.util as u; print(*(u.find_spec(n).submodule_search_locations[0] for n in %r), sep='\\n')"
    names = sorted({source.partition("/")[0] for source in SOURCES})
    ran = subprocess.run([python_of(version), "-c", where % names], capture_output=True, text=True, check=True)
    folders = dict(zip(names, ran.stdout.split("\n"), strict=False))
    text = "".join((Path(folders[source.partition("/")[0]]).parent / source).read_text("utf-8") for source in SOURCES)
    there = set(re.findall(r"\b_[a-z]\w*", text))
    assert set(TABLE) - COMES_AND_GOES - there == set()

"""Checkpoints that the Trainer wrote by itself: whether one is whole, as far as its files can tell.

Nothing in such a directory says what belongs to it, and nothing was synced, so a kill or a power cut can leave any part
of it. Checked is what the Trainer itself would stumble over, or silently do without:

- all that a resume needs is there: weights, optimizer, scheduler, the generators of every rank;
- JSON files parse, and the state is one that the Trainer can go on with, of the step in the directory's name;
- a ``.safetensors`` file is exactly as long as its header says, tensor by tensor;
- every record of a torch archive has its checksum, which is verified over all bytes.

What cannot be seen: rotten bytes *within* a tensor of a ``.safetensors`` file, and a JSON file that has become another
valid one. Neither has checksums. A checkpoint with a manifest of ours is verified to the byte.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from typing_extensions import Buffer

from easyckpt.errors import DamagedCheckpoint, EasyckptError, ForeignFormat
from easyckpt.format.safetensors import header_size, parse_header
from easyckpt.integrations.transformers.names import rng_file
from easyckpt.integrations.transformers.trainer_state import require_state
from easyckpt.storage.base import FileReader
from easyckpt.storage.local import LocalStorage

STATE = "trainer_state.json"
#: The Trainer's own mark of a checkpoint that it was still writing when the job's time was up.
UNFINISHED = "checkpoint-is-incomplete.txt"
WEIGHTS = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
#: A pickle of the arguments, for people.
NEVER_READ = "training_args.bin"
#: What is looked at only where it is there: not every job has them.
OPTIONAL = ("config.json", "generation_config.json", "adapter_config.json", "scaler.pt", NEVER_READ)

_NUMBERED = re.compile(r"checkpoint-(\d+)")
_GENERATORS = re.compile(r"rng_state(_\d+)?\.pth")
_ZIP = b"PK\3\4"
_PIECE = 1 << 20


def problem(
    directory: str,
    *,
    world_size: int = 1,
    ranks: Sequence[int] | None = None,
    busy: Callable[[], None] = lambda: None,
) -> str | None:
    """Why a job of `world_size` processes cannot go on exactly from the Trainer's checkpoint; None where it can.

    `ranks` are those that go on from this one; None: all. Reads every torch archive once, and runs nothing in it;
    `busy` is called as that gets on. Layouts of FSDP and DeepSpeed are not known here: they are said to have no
    weights.
    """

    def look(found: _Directory) -> None:
        for name in [STATE, *found.weights(), *found.training(world_size, ranks), *found.optional()]:
            found.require_whole(name)
            if name.endswith((".bin", ".pt", ".pth")) and name != NEVER_READ:
                load_pickle(found.path(name), mapped=True)  # the archive is whole: what else may keep torch from it?
        found.require_state()

    return _problem(directory, look, busy)


def lacks(directory: str, *, world_size: int, ranks: Sequence[int] | None = None) -> str | None:
    """As `problem`, of what is not there at all; the files themselves are not read."""

    def look(found: _Directory) -> None:
        found.weights()
        found.training(world_size, ranks)
        found.require_step()

    return _problem(directory, look, lambda: None)


def state_problem(directory: str) -> str | None:
    """As `problem`, of the Trainer's state alone, where there is one: not every rank of a sharded job writes it."""
    if not os.path.lexists(os.path.join(directory, STATE)):
        return None
    return _problem(directory, _Directory.require_state, lambda: None)


def _problem(directory: str, look: Callable[[_Directory], None], busy: Callable[[], None]) -> str | None:
    try:
        look(_Directory(directory, busy))
    except EasyckptError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or directory}: {error.strerror or error}"
    return None


def step_of(directory: str) -> int:
    """The step of a checkpoint that has no `problem`."""
    return int(json.loads(LocalStorage(directory).read(STATE))["global_step"])


def load_pickle(path: str, *, mapped: bool = False) -> Any:
    """What torch.save wrote to one of the Trainer's own files; tensors on the CPU, or `mapped` out of the file.

    Only tensors, plain values and the arrays of NumPy's generator are built: whatever else the file names is not even
    imported. Raises ForeignFormat for a file that asks for more, DamagedCheckpoint for one that torch cannot read.
    Have `problem` look first: torch does not compare the archive's checksums.
    """
    try:
        allowed = torch.serialization.get_safe_globals()  # what the program itself has allowed is not to be taken back
        with torch.serialization.safe_globals([one for one in _generator_globals() if one not in allowed]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        asked = re.search(r"Unsupported[^\n]*?(?= was not|\. |\n|$)", str(error))
        reason = asked[0] if asked else " ".join(str(error).split())[:200]
        raise ForeignFormat(f"{path}: holds more than tensors and plain values, and is not read: {reason}") from None
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - a damaged file may raise anything
        raise DamagedCheckpoint(f"{path}: torch cannot read it: {' '.join(str(error).split())[:300]}") from None


def _generator_globals() -> list[Any]:
    """What a file names that holds the state of NumPy's generator, an array of uint32. NumPy 1 called it otherwise."""
    rebuild = getattr(np, "_core", None) or np.core  # NumPy 1 has no _core
    function = rebuild.multiarray._reconstruct
    names = [(function, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
    return [*names, np.ndarray, np.dtype, type(np.dtype(np.uint32))]


class _Directory:
    """A checkpoint's files by name. Every method raises EasyckptError, or OSError, with the problem in words."""

    def __init__(self, path: str, busy: Callable[[], None]) -> None:
        self._path, self._busy = os.path.abspath(path), busy
        self._names = set(LocalStorage(self._path).listdir(""))
        if UNFINISHED in self._names:
            raise DamagedCheckpoint(f"{UNFINISHED} says that the Trainer was stopped while it wrote")
        self._require(STATE, "it is written last, so the job died while it saved")

    def path(self, name: str) -> str:
        """Where the file is."""
        return os.path.join(self._path, name)

    def weights(self) -> list[str]:
        """Every file that holds some of the model."""
        files = [name for name in WEIGHTS if name in self._names]
        for index in INDEXES:
            files += self._shards(index) if index in self._names else []
        for folder in sorted(self._names):  # of several adapters, each has a folder
            inside = self.path(folder)
            if os.path.isdir(inside):
                files += [f"{folder}/{name}" for name in LocalStorage(inside).listdir("") if name in WEIGHTS[2:]]
        if not files:
            raise DamagedCheckpoint(f"there are no weights ({', '.join(WEIGHTS[:3])} or an index of several files)")
        return files

    def _shards(self, index: str) -> list[str]:
        table = self._json(index)
        places = table.get("weight_map") if isinstance(table, dict) else None
        if not isinstance(places, dict) or not places:
            raise DamagedCheckpoint(f"{index} does not say which file holds which weight")
        for name in places.values():
            self._require(name, f"{index} says that it holds weights")
        return sorted(set(places.values()))

    def training(self, world_size: int, ranks: Sequence[int] | None) -> list[str]:
        """The files of optimizer, scheduler and generators; without them the Trainer trains on, but not the same."""
        advice = "(save_only_model checkpoints are for inference)"
        for name, fresh in (("optimizer.pt", "a fresh optimizer"), ("scheduler.pt", "a fresh scheduler and optimizer")):
            self._require(name, f"training would silently go on with {fresh} {advice}")
        written = sorted(filter(_GENERATORS.fullmatch, self._names))
        generators = [rng_file(rank, world_size) for rank in (range(world_size) if ranks is None else ranks)]
        for name in generators:
            there = f"; there are {', '.join(written[:8])}, for another number of processes?" if written else ""
            self._require(name, f"training would silently go on with fresh generators {advice}{there}")
        return ["optimizer.pt", "scheduler.pt", *generators]

    def optional(self) -> list[str]:
        """What else of the Trainer's own is there."""
        return [name for name in OPTIONAL if name in self._names]

    def require_state(self) -> None:
        """The Trainer can go on with its state."""
        self.require_step()
        try:
            require_state(self._json(STATE))
        except DamagedCheckpoint as error:
            raise DamagedCheckpoint(f"{STATE}: {error}") from None

    def require_step(self) -> None:
        """The state is of the step in the directory's name, if that has one."""
        state, match = self._json(STATE), _NUMBERED.fullmatch(os.path.basename(self._path))
        step = state.get("global_step") if isinstance(state, dict) else None
        if type(step) is not int or step < 0:
            raise DamagedCheckpoint(f"{STATE} has no global_step")
        if match and int(match[1]) != step:
            raise DamagedCheckpoint(f"{STATE} is of step {step}, the directory's name says {match[1]}")

    def require_whole(self, name: str) -> None:
        """As far as its kind of file can tell."""
        if name.endswith(".json"):
            self._json(name)
            return
        with self._open(name) as reader:
            if name.endswith(".safetensors"):
                _require_tensors(name, reader)
            else:
                _require_archive(name, reader, self._busy)

    def _require(self, name: object, why: str) -> None:
        if name not in self._names:
            raise DamagedCheckpoint(f"{name} is missing: {why}")

    def _json(self, name: str) -> Any:
        with self._open(name) as reader:
            text = _bytes(reader, 0, reader.size)
        try:
            return json.loads(text.decode())  # the Trainer reads UTF-8 alone
        except (ValueError, RecursionError) as error:
            raise DamagedCheckpoint(f"{name} is no JSON: {error}") from None

    @contextlib.contextmanager
    def _open(self, name: str) -> Iterator[FileReader]:
        """The file, wherever a link may lead; an empty one is nothing that the Trainer writes."""
        folder, last = os.path.split(os.path.realpath(self.path(name)))
        with LocalStorage(folder, direct_io=False).reader(last) as reader:  # the page cache serves the load, too
            if reader.size == 0:
                raise DamagedCheckpoint(f"{name} is empty")
            yield reader


def _bytes(reader: FileReader, offset: int, size: int) -> bytes:
    buffer = bytearray(size)
    return bytes(buffer[: reader.read_into(buffer, offset)])


def _require_tensors(name: str, reader: FileReader) -> None:
    try:
        begin = header_size(_bytes(reader, 0, 8), reader.size)
        parse_header(_bytes(reader, 8, begin - 8), reader.size - begin)
    except ForeignFormat as error:
        raise DamagedCheckpoint(f"{name}: {error}") from None


def _require_archive(name: str, reader: FileReader, busy: Callable[[], None]) -> None:
    if _bytes(reader, 0, len(_ZIP)) != _ZIP:
        raise DamagedCheckpoint(f"{name} is no archive of torch 1.6 or newer, and a bare pickle has no checksums")
    try:
        with zipfile.ZipFile(io.BufferedReader(_Stream(reader, busy), _PIECE)) as archive:
            records = archive.infolist()
            stored = all(record.compress_type == zipfile.ZIP_STORED for record in records)
            rotten = archive.testzip() if stored else None
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - a damaged archive may raise anything
        raise DamagedCheckpoint(f"{name} is truncated or damaged: {error}") from None
    if not stored or not any(record.filename.endswith("/data.pkl") for record in records):
        raise DamagedCheckpoint(f"{name} is an archive, but not one of torch.save")
    if rotten is not None:
        raise DamagedCheckpoint(f"{name}: the checksum of {rotten} is wrong")


class _Stream(io.RawIOBase):
    """A reader with a position, which is what zipfile asks for."""

    def __init__(self, reader: FileReader, busy: Callable[[], None]) -> None:
        self._reader, self._busy, self._position = reader, busy, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._reader.size}[whence]
        if begin + offset < 0:
            raise ValueError("a position before the file's begin")
        self._position = begin + offset
        return self._position

    def readinto(self, buffer: Buffer, /) -> int:
        count = self._reader.read_into(memoryview(buffer), self._position)
        self._position += count
        self._busy()
        return count

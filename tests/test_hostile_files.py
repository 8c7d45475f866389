"""Thousands of damaged and hostile files: a clear error each, no crash, nothing of the user's touched, no code run.

A mutation is either blind (bits, bytes, lengths) or knows the format: it changes any value inside the JSON and seals
the record again, so that only the checks behind the digest stand between it and the user.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import easyckpt
from easyckpt.errors import EasyckptError
from easyckpt.format import records
from easyckpt.loading.snapshot import open_memory
from easyckpt.memory.slot import open_slot
from easyckpt.state.apply import apply_all, check_all
from easyckpt.state.capture import StateCapture

SEED = 20_240_229
KINDS = ("manifest", "index", "shard", "root", "slot")
FULL, SAMPLE = 10_000, 400
ODD_VALUES = [None, True, -1, 0, 2**63, 1e308, "", "..", "/etc/passwd", "a/b", "\ud800", [], {}, [[[]]], "0" * 70, 3.5]


class Victim:
    """The user's objects, and what they must hold: either untouched or the truth."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.progress = {"epoch": -1, "names": ["untouched"]}
        self.state = {"model": self.model, "progress": self.progress}

    def digest(self) -> tuple:
        weights = tuple(tuple(value.reshape(-1).tolist()) for value in self.model.state_dict().values())
        return weights, json.dumps(self.progress)


@pytest.fixture(scope="module")
def committed(tmp_path_factory) -> tuple[Path, Path, tuple]:
    """A root with one checkpoint, a directory with the same snapshot in memory, and the digest of the truth."""
    base = tmp_path_factory.mktemp("hostile")
    memory = base / "memory"
    memory.mkdir()
    truth = Victim()
    torch.manual_seed(1)
    truth.progress.update(epoch=5, names=["a", "b"])
    settings = {"memory_dir": str(memory), "events": False, "save_storage_interval": 10**9}
    checkpointer = easyckpt.Checkpointer(base / "run", truth.state, **settings)
    checkpointer.load()
    checkpointer.save(5, wait=True)
    checkpointer.abandon()
    return base / "run", memory, truth.digest()


def blind(data: bytes, rng: random.Random) -> bytes:
    mutated = bytearray(data)
    kind = rng.randrange(6)
    place = rng.randrange(len(data))
    if kind == 0:
        mutated[place] ^= 1 << rng.randrange(8)
    elif kind == 1:
        mutated[place] = rng.randrange(256)
    elif kind == 2:
        del mutated[place:]
    elif kind == 3:
        mutated[place:place] = rng.randbytes(rng.randrange(1, 20))
    elif kind == 4:
        end = min(len(data), place + rng.randrange(1, 64))
        mutated[place:end] = bytes(end - place)
    else:
        end = min(len(data), place + rng.randrange(1, 64))
        del mutated[place:end]
    return bytes(mutated)


def knowing(data: bytes, rng: random.Random) -> bytes:
    """Change one value anywhere in the record, or drop or add a key, and seal it again."""
    document = json.loads(data)
    document.pop("digest")
    places: list[tuple] = []

    def walk(node) -> None:
        keys = list(node) if isinstance(node, dict) else range(len(node))
        for key in keys:
            places.append((node, key))
            if isinstance(node[key], (dict, list)):
                walk(node[key])

    walk(document)
    node, key = rng.choice(places)
    kind = rng.randrange(4)
    if kind == 0:
        del node[key]
    elif kind == 1 and isinstance(node[key], int):
        node[key] += rng.choice([-1, 1, 8, -4096, 2**40])
    elif kind == 2:
        other, other_key = rng.choice(places)
        node[key] = json.loads(json.dumps(other[other_key]))
    else:
        node[key] = rng.choice(ODD_VALUES)
    return records.seal(json.dumps(document).encode())


def mutations(count: int):
    """(number, kind, generator of random numbers), the same for the same count."""
    for number in range(count):
        yield number, KINDS[number % len(KINDS)], random.Random(SEED + number)


def attack_storage(root: Path, path: Path, data: bytes, victim: Victim) -> BaseException | None:
    original = path.read_bytes()
    path.write_bytes(data)
    try:
        easyckpt.restore(root, victim.state)
    except Exception as error:
        return error
    finally:
        path.write_bytes(original)
    return None


def attack_memory(path: Path, data: bytes, victim: Victim) -> BaseException | None:
    original = path.read_bytes()
    path.write_bytes(data)
    try:
        view = open_slot(str(path))
        if view is None:
            return easyckpt.DamagedCheckpoint("not sealed")
        snapshot = open_memory(view, rank=0, world_size=1)
        live = StateCapture(victim.state).components
        problems = check_all(
            live, snapshot.layout, snapshot.layout.trees, snapshot.objects, components=set(victim.state)
        )
        if problems:
            return easyckpt.StateMismatch("; ".join(problems))
        layout = snapshot.layout
        apply_all(live, layout, layout.trees, snapshot.objects, snapshot.leaf, components=set(victim.state))
    except Exception as error:
        return error
    finally:
        path.write_bytes(original)
    return None


def run_campaign(committed, count: int) -> dict[str, int]:
    root, memory, truth = committed
    (slot,) = [path for path in memory.iterdir() if path.suffix == ".0"]
    files = {
        "manifest": root / "step-00000005" / "manifest.json",
        "index": root / "step-00000005" / "rank-00000.json",
        "shard": root / "step-00000005" / "rank-00000.safetensors",
        "root": root / "easyckpt.json",
    }
    executed = []
    sys.addaudithook(lambda event, args: executed.append(event) if event in DANGEROUS and armed[0] else None)
    armed = [False]
    outcomes = {"refused": 0, "harmless": 0}
    for number, kind, rng in mutations(count):
        victim = Victim()
        before = victim.digest()
        path = slot if kind == "slot" else files[kind]
        data = path.read_bytes()
        if kind == "slot":  # the header and the tail: the image is verified by option only
            image = 4096
            end = len(data) - 4096 * 18
            part = blind(data[:image] if rng.random() < 0.7 else data[end:], rng)
            mutated = part + data[image:] if len(part) <= image + 20 and rng.random() < 0.7 else data[:end] + part
        elif kind in ("manifest", "index", "root") and rng.random() < 0.6:
            mutated = knowing(data, rng)
        else:
            mutated = blind(data[:4096], rng) + data[4096:] if kind == "shard" else blind(data, rng)
        armed[0] = True
        error = attack_memory(path, mutated, victim) if kind == "slot" else attack_storage(root, path, mutated, victim)
        armed[0] = False
        after = victim.digest()
        where = f"mutation {number} of {kind} (seed {SEED + number})"
        if error is None:
            assert after == truth, f"{where} was applied and is not the truth"
            outcomes["harmless"] += 1
        else:
            assert isinstance(error, EasyckptError), f"{where}: {type(error).__name__}: {error}"
            assert len(str(error)) > 10, f"{where}: {error!r} says nothing"
            assert after == before, f"{where}: objects were changed before {error}"
            outcomes["refused"] += 1
    assert executed == []
    return outcomes


DANGEROUS = {"pickle.find_class", "exec", "os.system", "subprocess.Popen", "import"}


def test_a_sample_of_hostile_files_is_refused_or_harmless(committed):
    outcomes = run_campaign(committed, SAMPLE)
    assert outcomes["refused"] > SAMPLE // 2


@pytest.mark.soak
def test_ten_thousand_hostile_files_are_refused_or_harmless(committed, campaign_part):
    outcomes = run_campaign(committed, FULL)
    assert outcomes["refused"] > FULL // 2
    campaign_part("hostile_files", seed=SEED, tests=1, mutations=FULL, **outcomes)

"""The resume lab keeps what its page says: run once for real, and every file that it leaves is looked into."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

LAB = Path(__file__).resolve().parent.parent / "examples" / "resume_lab"
RUNS = ("straight", "resumed", "noopt", "noskip")
FILES = {
    *(f"{run}.pth" for run in RUNS),
    *("straight_log.csv", "resumed_log.csv", "resume.pth", "straight_fp16.pth", "fp16.json", "optim.json", "report.md"),
}
HEADINGS = {
    "en": ["What is saved", "What leaving it out does", "Half precision"],
    "ja": ["何を保存するか", "抜くと", "半精度"],
    "ko": ["무엇을 저장하나", "빠뜨리면", "반정밀도"],
}


def run_lab(program: str, *arguments: object, armed: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(LAB / program), *map(str, arguments)],
        env={**os.environ, "EASYCKPT_FAILPOINTS": armed},
        capture_output=True,
        text=True,
        check=False,
    )


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)


def bits(weights: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: value.contiguous().numpy().tobytes() for name, value in weights.items()}


def headings(report: str) -> list[str]:
    return [line.removeprefix("## ") for line in report.splitlines() if line.startswith("## ")]


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """What `make lab` leaves, with its report in Korean."""
    out = tmp_path_factory.mktemp("lab") / "made" / "by it"
    done = run_lab("lab.py", "--out", out, "--lang", "ko")
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_the_folder_holds_the_files_and_nothing_half_written(folder):
    assert {path.name for path in folder.iterdir()} == FILES


def test_the_resumed_run_equals_the_straight_one_to_the_bit(folder):
    assert bits(tensors(folder / "resumed.pth")) == bits(tensors(folder / "straight.pth"))
    straight = (folder / "straight_log.csv").read_text().splitlines()
    assert (folder / "resumed_log.csv").read_text().splitlines() == [straight[0], *straight[31:]]


@pytest.mark.parametrize("run", ["noopt", "noskip"])
def test_a_run_that_leaves_a_part_out_is_clearly_another_one(folder, run):
    straight, other = tensors(folder / "straight.pth"), tensors(folder / f"{run}.pth")
    assert straight.keys() == other.keys()
    assert max(float((straight[name] - other[name]).abs().max()) for name in straight) > 1e-3


@pytest.mark.parametrize(("run", "steps"), [("straight", range(1, 61)), ("resumed", range(31, 61))])
def test_a_log_has_each_step_with_its_loss_in_six_decimals(folder, run, steps):
    header, *lines = (folder / f"{run}_log.csv").read_bytes().decode().removesuffix("\n").split("\n")
    assert header == "step,train_loss"
    assert [line.partition(",")[0] for line in lines] == [str(step) for step in steps]
    assert all(re.fullmatch(r"\d+,\d+\.\d{6}", line) for line in lines)


def test_the_model_learns(folder):
    losses = [float(line.partition(",")[2]) for line in (folder / "straight_log.csv").read_text().splitlines()[1:]]
    assert losses[0] > 5
    assert max(losses[-10:]) < 4


def test_the_resume_file_holds_four_parts_and_nothing_else(folder):
    saved = tensors(folder / "resume.pth")
    assert saved.keys() == {"model", "optimizer", "step", "gen_state"}
    assert saved["step"] == 30
    assert bits(saved["model"]).keys() == bits(tensors(folder / "straight.pth")).keys()


def test_batches_are_drawn_by_a_generator_of_seed_7_eight_windows_a_step(folder):
    generator = torch.Generator().manual_seed(7)
    for _ in range(30):
        torch.randint(1000, (8, 1), generator=generator)
    saved = tensors(folder / "resume.pth")
    assert torch.equal(saved["gen_state"], generator.get_state())
    assert saved["model"]["place.weight"].shape[0] == 128


def test_a_run_that_stops_has_the_learning_rate_of_the_whole_one(folder):
    expected = 3e-3 * (0.1 + 0.45 * (1 + math.cos(math.pi * 29 / 60)))
    assert [group["lr"] for group in tensors(folder / "resume.pth")["optimizer"]["param_groups"]] == [expected]


def test_the_numbers_of_the_optimizer_are_those_in_the_resume_file(folder):
    saved = tensors(folder / "resume.pth")
    told = json.loads((folder / "optim.json").read_text())
    assert saved["model"]["head.weight"].data_ptr() == saved["model"]["token.weight"].data_ptr()
    model = sum(value.numel() for name, value in saved["model"].items() if name != "head.weight")
    states = saved["optimizer"]["state"].values()
    optimizer = sum(value.numel() for state in states for value in state.values() if value.dim())
    assert told == {"model_numel": model, "optimizer_numel": optimizer, "ratio": 2.0}
    assert optimizer == 2 * model


def test_half_precision_is_the_straight_run_rounded_with_both_sizes_told(folder):
    full, half = tensors(folder / "straight.pth"), tensors(folder / "straight_fp16.pth")
    assert bits(half) == bits({name: value.half() for name, value in full.items()})
    told = json.loads((folder / "fp16.json").read_text())
    assert told.keys() == {"fp32_bytes", "fp16_bytes", "max_logit_diff"}
    assert told["fp32_bytes"] == (folder / "straight.pth").stat().st_size
    assert told["fp16_bytes"] == (folder / "straight_fp16.pth").stat().st_size
    assert told["fp16_bytes"] < 0.55 * told["fp32_bytes"]
    assert 0 < told["max_logit_diff"] < 0.1


def test_the_report_is_in_the_language_asked_for_and_has_the_measured_numbers(folder):
    report = (folder / "report.md").read_text("utf-8")
    assert headings(report) == HEADINGS["ko"]
    half, optim = (json.loads((folder / name).read_text()) for name in ("fp16.json", "optim.json"))
    numbers = [half["fp32_bytes"], half["fp16_bytes"], optim["model_numel"], optim["optimizer_numel"]]
    assert all(str(number) in report for number in [*numbers, (folder / "resume.pth").stat().st_size])
    assert f" {half['max_logit_diff']:.3g} " in report
    assert "| `resumed` | 없음 | 예 | 0 | 0 | - |" in report
    straight = tensors(folder / "straight.pth")
    for run, part, first in (("noopt", "optimizer", 32), ("noskip", "gen_state", 31)):
        other = tensors(folder / f"{run}.pth")
        gap = max(float((straight[name] - other[name]).abs().max()) for name in straight)
        assert re.search(rf"\| `{run}` \| `{part}` \| 아니요 \| {gap:.3g} \| 0\.\d+ \| {first} \|", report)


@pytest.fixture
def report_module():
    spec = importlib.util.spec_from_file_location("resume_lab_report", LAB / "report.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def places(language: str) -> set[str]:
    return set(re.findall(r"\$(\w+)", (LAB / "texts" / f"{language}.md").read_text("utf-8")))


@pytest.mark.parametrize("language", HEADINGS)
def test_each_language_has_the_three_sections_and_every_number(report_module, language):
    numbers = {name: 1001 + place for place, name in enumerate(sorted(places("en")))}
    report = report_module.render(language, numbers)
    assert headings(report) == HEADINGS[language]
    assert places(language) == places("en")
    assert all(str(number) in report for number in numbers.values())
    assert "$" not in report


def test_a_difference_is_never_rounded_to_nothing(report_module):
    assert [report_module.shown("en", value) for value in (0.0, 1e-9, 2.0, 0.0012593)] == [
        "0",
        "1e-09",
        "2.0",
        "0.00126",
    ]


@pytest.fixture(scope="session")
def by_hand(tmp_path_factory) -> Path:
    """A folder in which the lab was told to stop after step 30, and train.py to go on without the optimizer's state."""
    out = tmp_path_factory.mktemp("by_hand")
    for program, arguments in (("lab.py", ["--stop-at", 30]), ("train.py", ["--resume", "--no-optim"])):
        done = run_lab(program, *arguments, "--out", out)
        assert done.returncode == 0, done.stderr
    return out


def test_single_runs_leave_the_same_bytes_as_the_whole_exercise(folder, by_hand):
    assert {path.name for path in by_hand.iterdir()} == {"resume.pth", "noopt.pth"}
    for path in by_hand.iterdir():
        assert path.read_bytes() == (folder / path.name).read_bytes()


@pytest.mark.parametrize(
    ("moment", "finished"),
    [("storage.replace.written", 30), ("storage.replace.before_rename", 30), ("storage.replace.after_rename", 2)],
)
def test_a_kill_while_it_is_written_leaves_the_old_resume_file_or_the_new_one(folder, tmp_path, moment, finished):
    shutil.copy(folder / "resume.pth", tmp_path)
    assert run_lab("train.py", "--out", tmp_path, "--stop-at", 2, armed=f"{moment}=kill").returncode == -9
    saved = tensors(tmp_path / "resume.pth")
    assert saved.keys() == {"model", "optimizer", "step", "gen_state"}
    assert saved["step"] == finished


def test_the_next_run_clears_what_a_killed_one_left_half_written_and_nothing_of_others(tmp_path):
    (tmp_path / ".other.pth.0123456789abcdef.tmp").touch()
    run_lab("train.py", "--out", tmp_path, "--stop-at", 1, armed="storage.replace.before_rename=kill")
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".resume.pth.")]
    assert run_lab("train.py", "--out", tmp_path, "--stop-at", 1).returncode == 0
    assert {path.name for path in tmp_path.iterdir()} == {"resume.pth", ".other.pth.0123456789abcdef.tmp"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume"], "--stop-at 30 first"),
        (["--stop-at", "60"], "from 1 to 59"),
        (["--stop-at", "0"], "from 1 to 59"),
        (["--no-optim"], "--resume as well"),
        (["--resume", "--no-optim", "--no-skip"], "not allowed with"),
        (["--lang", "fr"], "'en', 'ja', 'ko'"),
    ],
)
def test_options_that_mean_nothing_are_refused_and_nothing_is_written(tmp_path, arguments, message):
    done = run_lab("lab.py", "--out", tmp_path / "lab", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "lab").exists()


def test_a_damaged_resume_file_is_said_in_one_line(tmp_path):
    (tmp_path / "resume.pth").write_bytes(b"garbage")
    done = run_lab("train.py", "--out", tmp_path, "--resume")
    assert done.returncode == 1
    assert done.stderr == f"{tmp_path / 'resume.pth'} is damaged, or no file of the lab. Make it again: --stop-at 30\n"


def test_a_file_in_the_folders_place_is_refused_and_stays(tmp_path):
    (tmp_path / "lab").write_text("mine")
    done = run_lab("train.py", "--out", tmp_path / "lab", "--stop-at", 1)
    assert (done.returncode, (tmp_path / "lab").read_text()) == (2, "mine")
    assert "is not a folder" in done.stderr


WITH_EASYCKPT = """
import sys
sys.path.insert(0, sys.argv[1])
import easyckpt, torch
from data import load_text
from train import Training
root, last, out = sys.argv[2], int(sys.argv[3]), sys.argv[4]
torch.set_num_threads(1)
text, training = load_text(), Training()
progress = {"step": 0}
state = {"model": training.model, "optimizer": training.optimizer, "generator": training.generator}
with easyckpt.Checkpointer(root, state | {"progress": progress}, save_storage_interval=30) as ckpt:
    assert ckpt.load().step == last - 30
    while progress["step"] < last:
        training.step = progress["step"]
        training.one_step(text)
        progress["step"] += 1
        ckpt.save_if_needed(progress["step"])
torch.save(training.model.state_dict(), out)
"""


def test_a_checkpointer_does_the_same(folder, tmp_path):
    for last in (30, 60):
        arguments = [str(LAB), str(tmp_path / "run"), str(last), str(tmp_path / "end.pth")]
        subprocess.run([sys.executable, "-c", WITH_EASYCKPT, *arguments], check=True)
    assert bits(tensors(tmp_path / "end.pth")) == bits(tensors(folder / "straight.pth"))


@pytest.mark.soak
def test_the_lab_fails_where_the_resumed_run_is_another_one(tmp_path):
    """A copy of the lab, with four steps, whose resume forgets the optimizer's state without being told to."""
    lab = tmp_path / "resume_lab"
    shutil.copytree(LAB, lab, ignore=shutil.ignore_patterns("__pycache__"))
    for name, old, new in (
        ("train.py", "if not run.no_optim:", "if False:"),
        ("train.py", "STEPS = 60", "STEPS = 4"),
        ("lab.py", "STOP_AT = 30", "STOP_AT = 2"),
    ):
        source = (lab / name).read_text()
        assert source.count(old) == 1
        (lab / name).write_text(source.replace(old, new))
    done = run_lab(str(lab / "lab.py"), "--out", tmp_path / "out")
    assert done.returncode == 1
    assert "FAILED: the resumed run, and no other, must equal the straight one" in done.stderr
    assert "| `resumed` | nothing | no | 0.0" in (tmp_path / "out" / "report.md").read_text()

"""Every example runs, is as short as promised, and learns what it should."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from drumline.base.user_code import load_class
from tests.example_folders import MAKERS
from tests.warm import warm_python

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.name != "spirals.py")
COMMANDS = re.compile(r"^ *((?:drumline|torchrun|python) .*)$", re.MULTILINE)
LONGEST = dict.fromkeys((path.name for path in EXAMPLES), 80) | {"own_task.py": 40}
PROGRAMS = {
    "drumline": ["-m", "drumline"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone"],
    "python": [],
}
# The examples whose libraries take seconds to load. They run in processes that have them loaded,
# and are given the rate that a tiny model needs to learn within seconds.
HUGGING_FACE = {
    "finetune_lm.py": "--optim.lr 0.01 --watch.sidecar off",
    "finetune_classifier.py": "--optim.lr 0.01 --train.epochs 6 --watch.sidecar off",
    "lora.py": "--optim.lr 0.02 --train.epochs 6 --watch.sidecar off",
    "hf_dataset.py": "--watch.sidecar off",
}


def commands() -> list[tuple[str, str]]:
    """What the examples' own docstrings say to type."""
    return [
        (path.name, command) for path in EXAMPLES for command in COMMANDS.findall(path.read_text())
    ]


LONG = ("contrastive.py", "gan.py", "image_folder.py", "web_dataset.py")
QUICK = {name for name, _ in commands()} - HUGGING_FACE.keys() - set(LONG)


def run_in(folder: Path, command: str) -> str:
    """What it printed. It has to succeed."""
    program, *arguments = command.split()
    result = subprocess.run(
        [sys.executable, *PROGRAMS[program], *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stderr + result.stdout


def assert_learned(output: str) -> None:
    matches = re.findall(r"(?:accuracy|step \d+:)\s+([\d.]+)(%?)", output)
    assert matches, output
    value, percent = matches[-1]
    assert float(value) / (100 if percent else 1) > 0.9, output


def test_every_example_says_how_to_run_it() -> None:
    assert len(EXAMPLES) >= 3
    assert {name for name, _ in commands()} == {path.name for path in EXAMPLES}


def test_commands_of_the_recipes_are_those_of_the_examples() -> None:
    shown = re.findall(
        r"^\$ (drumline train examples/.*)$",
        (ROOT / "docs" / "recipes.md").read_text(),
        re.MULTILINE,
    )
    assert len(shown) >= len(HUGGING_FACE)
    assert set(shown) <= {command for _, command in commands()}


@pytest.mark.parametrize(("name", "lines"), LONGEST.items())
def test_examples_are_short(name: str, lines: int) -> None:
    assert len((ROOT / "examples" / name).read_text().splitlines()) <= lines


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    "name", [*sorted(QUICK), *(pytest.param(name, marks=pytest.mark.soak) for name in LONG)]
)
def test_an_example_runs_and_learns(tmp_path: Path, name: str) -> None:
    """Its commands, one after another in one folder: where there are checkpoints, the next one
    resumes."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    if name in MAKERS:
        MAKERS[name](tmp_path)
    for number, command in enumerate(command for example, command in commands() if example == name):
        output = run_in(tmp_path, command)
        assert_learned(output)
        if saved := sorted(tmp_path.glob("runs/*/checkpoints/step-*")):
            is_resumed = "the number of ranks changed since the checkpoint: 1 -> 2" in output
            assert is_resumed == (number > 0), output
            shutil.rmtree(saved[-1])  # so that some steps are left for the next one


@pytest.mark.soak
def test_examples_on_hugging_face_learn_resume_and_are_right_on_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All in one test: the libraries are loaded once. What is checked, and why, is in
    tests/hugging_face_jobs.py."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    with warm_python(tmp_path / "bin", "tests.hugging_face_jobs") as program:
        monkeypatch.setattr(sys, "executable", program)
        run_in(tmp_path, "python -m tests.hugging_face_jobs make")
        for name, command in commands():
            if name in HUGGING_FACE:
                assert_learned(run_in(tmp_path, f"{command} {HUGGING_FACE[name]}"))
        run_in(tmp_path, "python -m tests.hugging_face_jobs check")


# WebDataset leaves its files to the garbage collector to close.
@pytest.mark.soak
@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_a_stream_of_shards_continues_where_its_state_was_taken(tmp_path: Path) -> None:
    MAKERS["web_dataset.py"](tmp_path)
    stream = load_class(f"{ROOT / 'examples' / 'web_dataset.py'}:OwnShards")
    paths = sorted(map(str, (tmp_path / "shards").glob("train-*.tar")))[:2]
    orders: list[object] = []
    for epoch in (0, 1):
        whole = stream(paths)
        whole.set_epoch(epoch)
        samples = [(point.tolist(), label) for point, label in whole]
        assert len(samples) == 1000
        assert samples not in orders, "each round has its own order"
        orders.append(samples)
    # 500: at the end of a shard, 1000: at the very end
    for taken in (0, 3, 500, 997, 1000):
        first = stream(paths)
        second = stream(paths)
        first.set_epoch(epoch)
        before = list(islice(first, taken))
        second.set_epoch(epoch)
        second.load_state_dict(first.state_dict())
        assert len(before) == taken
        assert [(point.tolist(), label) for point, label in second] == samples[taken:]

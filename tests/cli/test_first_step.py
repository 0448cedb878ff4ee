"""From the command to the first step: it is measured, and nothing is loaded on the way that no step
needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drumline.runs.events import read_events

ROOT = Path(__file__).parents[2]
SMALL = ["--model.widths", "4", "--train.steps", "2", "--dist.device", "cpu"]
# For flags, for pictures, for the screen, for sharded checkpoints.
NOT_NEEDED = {"tyro", "matplotlib", "pandas", "tensorboard", "rich", "torch.distributed.checkpoint"}
# Torch loads it with the first optimizer.
COMPILER = "torch._dynamo"
# Without torch, when a test gets a Python that has it.
COLD = sys.executable
# Runs a command, and prints which modules of ours had a function called before the first
# optimizer.step returned, and in the end which modules are loaded.
TRACE_CALLS = """
import sys
from torch.optim.optimizer import register_optimizer_step_post_hook

called = set()

def is_import(frame):
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") != "__main__"

def on_call(frame, event, arg):
    name = frame.f_globals.get("__name__") or ""
    is_function = frame.f_code.co_flags & 1  # CO_OPTIMIZED: neither a module nor the body of a class
    if event == "call" and is_function and name.startswith("drumline.") and name not in called and not is_import(frame):
        called.add(name)

def on_step(*_):
    if sys.getprofile():
        sys.setprofile(None)
        print("called:", *sorted(called))

register_optimizer_step_post_hook(on_step)
from drumline.cli import main
sys.setprofile(on_call)
code = main(sys.argv[1:])
print("loaded:", *sys.modules)
sys.exit(code)
"""
# A launcher whose ranks have another Python.
LOOK = """
import sys
from drumline.cli import main
words = sys.argv[1:]
sys.executable = words.pop(0)
code = main(words)
print("loaded:", *sys.modules)
sys.exit(code)
"""


def run_and_look(program: str, *words: str, cwd: Path) -> tuple[str, set[str]]:
    """What a Python program prints, in a process without torch, and what is loaded there when it
    ends."""
    done = subprocess.run(
        [COLD, "-c", program, *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    output, _, loaded = done.stdout.rpartition("loaded: ")
    return output, set(loaded.split())


def first_steps(run: Path, rank: int) -> list[dict[str, Any]]:
    events = read_events(run / "events" / f"rank-{rank:05d}.jsonl")
    return [event for event in events if event["kind"] == "first_step"]


@pytest.mark.soak
def test_one_process_loads_what_a_step_needs_and_says_how_long_that_took(tmp_path: Path) -> None:
    output, loaded = run_and_look(
        TRACE_CALLS, "train", "digits", *SMALL, "--run", "run", cwd=tmp_path
    )
    assert "torch" in loaded
    assert loaded & NOT_NEEDED == set()
    (event,) = first_steps(tmp_path / "run", 0)
    assert (event["step"], event["since"]) == (1, "command")
    parts = [
        "python and torch",
        "rendezvous",
        "folder",
        "data",
        "model",
        "checkpoint",
        "warm-up",
        "first step",
    ]
    assert list(event["parts"]) == parts
    assert min(event["parts"].values()) >= 0
    assert output.count(" after the command: python and torch ") == 1
    assert (tmp_path / "run/logs/rank-00000.log").read_text().count(" after the command: ") == 1
    (line,) = (line for line in output.splitlines() if line.startswith("called: "))
    called = line.split()[1:]
    assert {
        "drumline.cli.train_command",
        "drumline.training.loop",
        "drumline.training.tasks.built_in",
    } <= set(called)


def test_a_launcher_computes_nothing_and_is_counted_too(tmp_path: Path, warm: None) -> None:
    words = ["train", "digits", *SMALL, "--procs", "2", "--run", "run"]
    output, loaded = run_and_look(LOOK, sys.executable, *words, cwd=tmp_path)
    assert "torch.distributed.elastic" in loaded
    assert loaded & {*NOT_NEEDED, COMPILER, "drumline.training.run"} == set()
    for rank in range(2):
        (event,) = first_steps(tmp_path / "run", rank)
        assert event["since"] == "command"
        assert list(event["parts"])[:3] == ["launcher", "python and torch", "rendezvous"]
    assert output.count(" after the command: launcher ") == 1

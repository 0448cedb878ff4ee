"""A run folder that version 0.1 left behind (tests/data/run-0.1) is verified and resumed by today's
code.

It was made by commit e0f35da: `STOP_AT=14 drumline train points.py:Points --run run-0.1
--train.epochs 4 --train.batch_size 8 --checkpoint.every_steps 5 --optim.name adamw --optim.lr
0.01`; step 5 was removed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from drumline import load_checkpoint
from drumline.base.errors import UsageError
from drumline.training.saved.saved_run import find_checkpoint

pytestmark = pytest.mark.usefixtures("warm")
DATA = Path(__file__).parents[1] / "data"
FLAGS = ["--train.epochs", "4", "--train.batch_size", "8", "--checkpoint.every_steps", "5"]
FLAGS += ["--optim.name", "adamw", "--optim.lr", "0.01"]


def drumline(*arguments: str, cwd: Path) -> str:
    command = [sys.executable, "-m", "drumline", *arguments]
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def weights(run: Path) -> dict[str, torch.Tensor]:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2)).double()
    assert load_checkpoint(run, model)["step"] == 20
    return model.state_dict()


def test_a_run_of_version_0_1_is_verified_and_resumed(tmp_path: Path) -> None:
    shutil.copytree(DATA / "run-0.1", tmp_path / "old")
    shutil.copy(DATA / "points.py", tmp_path)
    assert "1 of 1" in drumline("verify", "old", cwd=tmp_path)
    drumline("train", "points.py:Points", "--run", "old", *FLAGS, cwd=tmp_path)
    drumline("train", "points.py:Points", "--run", "new", *FLAGS, cwd=tmp_path)
    assert "20 steps in 2 starts" in drumline("verify", "old", cwd=tmp_path)
    old = weights(tmp_path / "old")
    new = weights(tmp_path / "new")
    # Another processor rounds otherwise: the first ten steps were taken on another machine.
    torch.testing.assert_close(old, new)


def test_the_best_of_version_0_1_is_known_from_the_end_of_the_run(tmp_path: Path) -> None:
    run = tmp_path / "old"
    shutil.copytree(DATA / "run-0.1", run)
    end_at(5, run)  # and resumed with more steps, then killed
    with pytest.raises(UsageError) as caught:
        find_checkpoint(run, "best")
    assert str(caught.value) == (
        f"the checkpoints in {run / 'checkpoints'} are of version 0.1, which recorded the best only at the end of a "
        'run\n  try: choose the last (--which last, which="last"), or one by its step'
    )
    end_at(10, run)
    assert find_checkpoint(run, "best") == find_checkpoint(run, "last") == find_checkpoint(run, 10)


def end_at(step: int, run: Path) -> None:
    with (run / "events" / "rank-00000.jsonl").open("a") as events:
        events.write(json.dumps({"kind": "end", "step": step, "best_step": step}) + "\n")

"""What `drumline train --procs` starts again, and what it does not: a restart that cannot help."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.test_command import drumline

pytestmark = pytest.mark.usefixtures("warm")
# Killed once, at step 3; from then on the same error at step 5, at every start.
TROUBLED = """
import os, signal
from pathlib import Path
from drumline.training.tasks import ImageClassification

class Troubled(ImageClassification):
    defaults = {
        "data.name": "digits", "model.widths": [4], "train.steps": 9, "train.batch_size": 64,
        "checkpoint.every_steps": 2, "checkpoint.background": False,
    }

    def loss(self, model, batch):
        saved = sorted(Path("runs/Troubled/checkpoints").glob("step-*"))
        self.step = getattr(self, "step", int(saved[-1].name[5:]) if saved else 0) + 1
        if os.environ["RANK"] == "1":
            if self.step == 4 and not Path("killed").exists():
                Path("killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if self.step == 6:
                raise ValueError("label 7 of 3 classes")
        return super().loss(model, batch)
"""


def test_a_kill_is_survived_and_an_error_that_repeats_is_not_tried_a_third_time(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.py").write_text(TROUBLED)
    result = drumline("train", "mine.py:Troubled", "--procs", "2", cwd=tmp_path)
    assert result.returncode == 1, result.stderr
    again = "drumline: restarting the ranks (restart {} of 3); "
    # It got from step 3 to step 5 in between: the second restart is the first one at its step.
    assert [result.stderr.count(again.format(number)) for number in (1, 2, 3)] == [2, 0, 0], (
        result.stderr
    )
    message = f"drumline: error: rank 1 on {socket.gethostname()} crashed at step 5: ValueError: label 7 of 3 classes\n"
    assert result.stderr.count(message) == 2, result.stderr
    assert result.stderr.index(again.format(1)) < result.stderr.index(message), (
        "first it was killed"
    )
    assert result.stderr.count("Traceback") == 2, "once for each start"
    assert "resumed at step 2" in result.stdout
    assert "resumed at step 4" in result.stdout


def test_a_full_disk_is_reported_once_and_no_restart_is_tried(
    small_disk: Callable[..., Path],
) -> None:
    words = [
        "--model.widths",
        "8",
        "--checkpoint.every_steps",
        "1",
        "--checkpoint.keep_last",
        "500",
    ]
    result = drumline(
        "train", "digits", "--procs", "2", "--run", "run", *words, cwd=small_disk("size=1m")
    )
    assert result.returncode == 1, result.stderr
    assert "restarting the ranks" not in result.stderr
    assert result.stderr.count("the disk is full") == 1, result.stderr
    (first, *_) = [
        line for line in result.stderr.splitlines() if line.startswith("drumline: error: ")
    ]
    assert f"[rank 0 on {socket.gethostname()}, step " in first
    assert "Traceback" not in result.stderr
    assert "OSError" not in result.stderr


NEVER_EXITS = """
import os, time
import torch.distributed as dist
from drumline.rank import group
from drumline.training.tasks import ImageClassification

group.LEAVE_S = 600  # so that the rank itself does not give up before the watchdog

class NeverExits(ImageClassification):
    defaults = {"data.name": "digits", "model.widths": [4], "train.steps": 40, "train.batch_size": 64}

    def loss(self, model, batch):
        time.sleep(0.05)  # so that the watchdog sees it train: it has more patience with the first steps
        return super().loss(model, batch)

if os.environ.get("RANK") == "1":
    dist.destroy_process_group = lambda: time.sleep(600)
"""


@pytest.mark.soak
def test_a_rank_that_does_not_exit_after_its_last_step_is_named_and_ended(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(NEVER_EXITS)
    words = ["--procs", "2", "--run", "run", "--watch.hang_s", "3", "--watch.on_hang", "stop"]
    result = drumline("train", "mine.py:NeverExits", *words, cwd=tmp_path)
    assert result.returncode == 70, result.stderr
    assert "done: 40 steps" in result.stdout
    hang = rf"drumline: hang: rank 1 on {re.escape(socket.gethostname())} left the loop \S+ s ago and has not exited"
    assert re.search(hang, result.stderr), result.stderr


# Rank 0 fails first and takes its time to report that; rank 1 fails right then, for reasons of its
# own.
BOTH_FAIL = """
import os, time, traceback
from pathlib import Path
from drumline.training.tasks import ImageClassification

class SlowToPrintError(ValueError):
    def __str__(self):
        if "describe_failure" in [frame.name for frame in traceback.extract_stack()]:
            Path("reporting").touch()
            time.sleep(2)
        return "the first"

class Both(ImageClassification):
    defaults = {"data.name": "digits", "model.widths": [4], "train.steps": 9, "train.batch_size": 64}
    calls = 0

    def loss(self, model, batch):
        Both.calls += model.training
        if Both.calls < 2:  # in the passes before the first step, whose errors are not reported
            return super().loss(model, batch)
        if os.environ["RANK"] == "0":
            raise SlowToPrintError
        while not Path("reporting").exists():
            time.sleep(0.02)
        raise ValueError("the second")
"""


def test_the_rank_that_failed_first_has_reported_before_another_ends(tmp_path: Path) -> None:
    """The launcher ends the rest when it sees one end: a busy first rank would be ended before it
    has printed."""
    (tmp_path / "mine.py").write_text(BOTH_FAIL)
    result = drumline("train", "mine.py:Both", "--procs", "2", cwd=tmp_path)
    assert result.returncode == 1, result.stderr
    assert (
        f"drumline: error: rank 0 on {socket.gethostname()} crashed: SlowToPrintError: the first\n"
        in result.stderr
    )
    assert result.stderr.count("Traceback") == 1, result.stderr
    assert "the second" not in result.stderr

"""A script trains, loads and evaluates, in processes of its own, and its own process stays as it
was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, signal, sys, threading
import torch
import drumline
from drumline.training.tasks import ImageClassification


class Mine(ImageClassification):
    defaults = {"data.name": "digits", "model.widths": [8], "train.steps": 4, "train.batch_size": 64}
    wrong_after: int | None = None

    def loss(self, model, batch):
        if self.wrong_after is not None and self.config.train.steps == self.wrong_after:
            raise ValueError("label 7 is out of range")
        return super().loss(model, batch)


def state():
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    return handlers, threading.enumerate(), torch.distributed.is_initialized(), torch.get_num_threads()


if __name__ == "__main__":
    before, generator = state(), torch.get_rng_state()
    settings = {"optim.lr": 0.05, "dist.device": "cpu", "checkpoint.every_steps": 3}
    result = drumline.train(Mine, run="runs/mine", procs=2, **settings)
    try:
        settings = {"task.wrong_after": 4, "dist.device": "cpu", "max-restarts": 0}
        drumline.train(Mine, run="runs/wrong", procs=int(sys.argv[1]), **settings)
    except drumline.DrumlineError as error:
        failure = {"text": str(error), "rank": error.place.rank, "notes": error.__notes__}
    model = drumline.load("runs/mine", which="last")
    print("RESULT " + json.dumps({
        "is_unchanged": before == state() and torch.equal(generator, torch.get_rng_state()),
        "metrics": result.metrics,
        "best": str(result.best_checkpoint),
        "run": str(result.run),
        "kinds": [event["kind"] for event in result.events],
        "lr": [event["lr"] for event in result.events if event["kind"] == "start"],
        "failure": failure,
        "shape": list(model(torch.zeros(2, 1, 8, 8)).shape),
    }))
"""


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def run(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.world_size(2)
def test_a_script_trains_its_own_task_and_evaluates_it(tmp_path: Path, warm: None) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run(tmp_path, "script.py", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    shown, _, found = done.stdout.rpartition("RESULT ")
    result: dict[str, Any] = json.loads(found)
    assert "script.py:Mine on 2 ranks (cpu, gloo)" in shown
    assert result["is_unchanged"]
    assert (result["run"], result["lr"], result["shape"]) == ("runs/mine", [0.05], [2, 10])
    assert {"start", "evaluation", "checkpoint", "end"} <= set(result["kinds"])
    assert Path(result["best"]).name == "step-00000004"
    failure = result["failure"]
    assert failure["text"].startswith("ValueError: label 7 is out of range [rank ")
    assert failure["rank"] in (0, 1)
    assert 'raise ValueError("label 7 is out of range")' in failure["notes"][0]
    for procs in ("1", "2"):
        evaluated = run(
            tmp_path, "-m", "drumline", "evaluate", "runs/mine", "--json", "--procs", procs
        )
        assert evaluated.returncode == 0, evaluated.stderr
        assert json.loads(evaluated.stdout)["metrics"] == result["metrics"]
    (tmp_path / "runs/mine/checkpoints/step-00000004/model.safetensors").unlink()
    people = run(
        tmp_path, "-m", "drumline", "evaluate", "runs/mine", "--procs", "2", "--which", "last"
    )
    skipped = "step-00000004 was skipped: model.safetensors is missing; step-00000003 is used as the last checkpoint\n"
    assert people.stderr == f"drumline: {skipped}"
    assert people.stdout.startswith("step 3: 360 samples on 2 ranks in ")
    assert "\n  loss         " in people.stdout
    missing = run(
        tmp_path, "-m", "drumline", "evaluate", "runs/mine", "--which", "9", "--procs", "1"
    )
    assert (missing.returncode, missing.stdout) == (2, "")
    assert "runs/mine has no checkpoint of step 9" in missing.stderr


SLOW = """
import drumline, time
from drumline.training.tasks import ImageClassification


class Slow(ImageClassification):
    defaults = {"data.name": "digits", "model.widths": [8], "train.steps": 1000, "train.batch_size": 64}

    def loss(self, model, batch):
        time.sleep(0.2)
        return super().loss(model, batch)


if __name__ == "__main__":
    try:
        drumline.train(Slow, run="run", procs=2, **{"dist.device": "cpu"})
    except KeyboardInterrupt:
        print("INTERRUPTED", flush=True)
"""


@pytest.mark.soak
@pytest.mark.world_size(2)
def test_ctrl_c_stops_the_ranks_and_the_call(tmp_path: Path, warm: None) -> None:
    """As from a notebook: only the calling process gets the signal."""
    (tmp_path / "slow.py").write_text(SLOW)
    shown = []
    with subprocess.Popen(
        [sys.executable, "slow.py"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            shown.append(line)
            if "first step" in line:
                process.send_signal(signal.SIGINT)
    assert process.returncode == 0, "".join(shown)
    assert shown[-1] == "INTERRUPTED\n"
    assert any("interrupted before the first save" in line for line in shown)
    deadline = time.monotonic() + 10
    while (left := processes_in(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def processes_in(folder: Path) -> list[str]:
    results = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").readlink() == folder:
                results.append((entry / "cmdline").read_bytes().decode())
        except OSError:
            continue
    return results

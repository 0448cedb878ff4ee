"""Signals to a launcher, to a rank, to a script: all ranks exit, none is restarted, and the exit
code shows it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drumline.runs.events import read_events
from tests.ranks import free_port
from tests.store_server import Bucket, Fault, Proxy, use_endpoint

ROOT = Path(__file__).parents[2]
TRAIN = [
    "digits",
    "--model.widths",
    "8",
    "--train.epochs",
    "2000",
    "--run",
    "run",
    "--log.every_steps",
    "1",
]
pytestmark = pytest.mark.usefixtures("warm")
SCRIPT = """
import os, signal, sys, time
def leave(number, frame):
    time.sleep(int(os.environ["RANK"]))  # one is quicker
    print("script saved after", signal.Signals(number).name, flush=True)
    sys.exit(75)
signal.signal(signal.SIGUSR1, leave)
open(f"ready-{os.environ['RANK']}", "w").close()
time.sleep(100)
"""


def start(cwd: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "drumline", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(process: subprocess.Popen[str], what: Callable[[], Any]) -> Any:
    while not (value := what()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    return value


def pid_of_rank(run: Path, rank: int) -> int | None:
    """Once it takes steps, this time."""
    file = run / "events" / f"rank-{rank:05d}.jsonl"
    events = list(read_events(file)) if file.exists() else []
    if not events or events[-1]["kind"] != "train":
        return None
    pid: int = json.loads((run / "environment.json").read_text())["ranks"][rank]["pid"]
    return pid


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_launched_task_leaves_by_a_signal_to_one_rank_and_to_the_launcher(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for told in ("rank", "launcher"):
        launcher = start(tmp_path, "launch", "--procs", "2", *TRAIN)
        pid = wait_for(launcher, lambda: pid_of_rank(run, 1))
        if told == "rank":
            os.kill(pid, signal.SIGUSR1)
        else:
            launcher.terminate()
        output, errors = launcher.communicate(timeout=60)
        assert launcher.returncode == 75, (output, errors)
        assert errors == ""  # neither "interrupted" nor "restarting the ranks"
        marker = json.loads((run / "preempted.json").read_text())
        assert (marker["signal"], marker["rank"]) == ("SIGUSR1", 1) if told == "rank" else "SIGTERM"
        sentence = f"saved step {marker['step']}; rerun the same command to resume"
        assert output.count("preempted by ") == output.count(sentence) == 1
        assert (run / "checkpoints" / f"step-{marker['step']:08d}").is_dir()
        resumed = "resumed at step" in output
        assert resumed == (told == "launcher")


# Rank 1 does not exit after it has saved.
STAYS = """
import atexit, os, time
from drumline.training.tasks import ImageClassification

class Stays(ImageClassification):
    defaults = {
        "data.name": "digits", "model.widths": [4], "train.epochs": 2000, "train.batch_size": 64, "log.every_steps": 1,
    }

    def __init__(self, config):
        super().__init__(config)
        if os.environ["RANK"] == "1" and os.path.exists("rank-1-stays"):
            atexit.register(time.sleep, 1000)
"""
HANGS = 3600.0  # seconds before an answer


GRACE_S = {"launch": 10, "train": 15}  # train has no flag for it


@pytest.mark.parametrize(
    ("verb", "fault", "rank_1_stays"),
    [
        pytest.param("launch", HANGS, True, id="launch-hung"),
        pytest.param("launch", 3.0, False, marks=pytest.mark.soak, id="launch-slow"),
        pytest.param("launch", "dead", False, marks=pytest.mark.soak),
        pytest.param("train", HANGS, True, marks=pytest.mark.soak, id="train-hung"),
        pytest.param("train", 3.0, False, marks=pytest.mark.soak, id="train-slow"),
        pytest.param("train", "dead", False, marks=pytest.mark.soak),
    ],
)
def test_a_run_that_has_saved_is_preempted_whatever_its_mirror_or_its_ranks_do_then(
    tmp_path: Path,
    bucket: Bucket,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    fault: Fault,
    rank_1_stays: bool,
) -> None:
    (tmp_path / "stays.py").write_text(STAYS)
    if rank_1_stays:
        (tmp_path / "rank-1-stays").touch()
    run = tmp_path / "run"
    words = ["--procs", "2", "stays.py:Stays", "--run", "run", "--checkpoint.mirror", bucket.url]
    grace_s = GRACE_S[verb]
    if verb == "launch":
        words = ["--grace", str(grace_s), *words]
    with Proxy(bucket.server) as proxy:
        use_endpoint(monkeypatch, proxy.url)
        launcher = start(tmp_path, verb, *words)
        wait_for(launcher, lambda: pid_of_rank(run, 1))
        if fault != "dead":
            proxy.fault = lambda method, path: fault
            launcher.terminate()
            output, errors = launcher.communicate(timeout=100)
    if fault == "dead":  # nothing listens there any more
        launcher.terminate()
        output, errors = launcher.communicate(timeout=100)
    assert launcher.returncode == 75, (output, errors)
    step = json.loads((run / "preempted.json").read_text())["step"]
    assert (run / "checkpoints" / f"step-{step:08d}" / "manifest.json").exists()
    assert output.count(f"saved step {step}; rerun the same command to resume") == 1
    assert (
        f"the checkpoint of step {step} is not in the mirror {bucket.url}: " in output + errors
    ), (output, errors)
    named_as_ours = (
        f"drumline: rank 1 did not exit within {grace_s} s after SIGTERM, so the launcher killed them\n"
        "  try: read the ends of the ranks' logs; at the end of a run --grace SECONDS gives them more time\n"
    )
    assert (named_as_ours in errors) == rank_1_stays, errors
    assert "failure: " not in output + errors, "nobody else has killed it"
    assert not list(run.glob("diagnoses/*"))


def test_a_script_gets_the_signal_and_its_code_is_the_launchers(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    launcher = start(tmp_path, "launch", "--procs", "2", "--max-restarts", "2", "script.py")
    wait_for(launcher, lambda: len(list(tmp_path.glob("ready-*"))) == 2)
    launcher.send_signal(signal.SIGUSR1)
    output, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 75, (output, errors)
    assert errors == ""
    assert output.count("script saved after SIGUSR1") == 2


def test_before_the_first_step_there_is_nothing_to_save(tmp_path: Path) -> None:
    slow = "import pathlib, time\npathlib.Path('loading').touch()\ntime.sleep(100)\n"
    (tmp_path / "slow.py").write_text(slow)
    rank = start(tmp_path, "train", "slow.py:Slow", "--procs", "1")
    port = free_port()
    settings = f"NUMBER_OF_NODES=2\nNODE_RANK=0\nNUMBER_OF_GPUS=1\nMASTER_ADDR=127.0.0.1\nMASTER_PORT={port}\n"
    (tmp_path / ".env").write_text(settings)
    node = start(tmp_path, "launch", "--env-file", ".env", "digits")
    wait_for(rank, (tmp_path / "loading").exists)
    rank.terminate()
    wait_for(node, lambda: is_open(port))
    node.send_signal(signal.SIGUSR1)
    rerun = "before the first step; rerun the same command to resume\n"
    assert rank.communicate(timeout=60)[1] == f"drumline: stopped by SIGTERM {rerun}"
    # On a busy machine it has said by then that it waits for the other node.
    assert node.communicate(timeout=60)[1].endswith(f"drumline: stopped {rerun}")
    assert (rank.returncode, node.returncode) == (75, 75)

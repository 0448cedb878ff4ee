"""`drumline launch --slurm` on a real Slurm of two hosts: submitted, pushed aside, requeued,
resumed, the same bits."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from drumline.cli import train_command
from drumline.runs import catalog
from drumline.runs.events import read_events
from tests.multinode import needs, processes
from tests.multinode.hosts import Host, Testbed
from tests.multinode.slurm import Slurm
from tests.ranks import run_ranks
from tests.schedules import digest
from tests.store_server import environment

pytestmark = pytest.mark.skipif(
    needs.missing_slurm() is not None, reason=str(needs.missing_slurm())
)
MakeTestbed = Callable[..., Testbed]
ROOT = Path(__file__).parents[2]
# As long as a file is there it takes its time, so that it is not done before it is pushed aside.
TASK = """
import os, time
from drumline.training.tasks import ImageClassification

class Digits(ImageClassification):
    defaults = {"data.name": "digits", "model.widths": [4], "train.steps": 40, "train.batch_size": 64}

    def loss(self, model, batch):
        time.sleep(0.4 if os.path.exists("slow") else 0)
        return super().loss(model, batch)
"""
TRAIN = ["task.py:Digits", "--log.every_steps", "2"]
# Counts its starts in a file, and does what the n-th is to do.
SCRIPT = """
import os, pathlib, signal, sys, time
count = pathlib.Path(f"starts-{os.environ['RANK']}")
starts = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(starts))
def leave(number, frame):
    print("heard", signal.Signals(number).name, flush=True)
    sys.exit(75)
signal.signal(signal.SIGUSR1, leave)
print("start", starts, "of rank", os.environ["RANK"], *sys.argv[1:], flush=True)
if starts == 1:
    time.sleep(1000)
sys.exit(9)
"""


def submit(host: Host, slurm: Slurm, cwd: Path, *arguments: str) -> str:
    done = host.run(
        *(host.python, "-m", "drumline", "launch", "--slurm"),
        *arguments,
        env={
            **slurm.environment,
            "PYTHONPATH": str(ROOT),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
        },
        cwd=cwd,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_pushed_aside_requeued_and_resumed_is_the_same_run(
    make_testbed: MakeTestbed, tmp_path: Path
) -> None:
    bed = make_testbed("a", "b", warm=True)
    slurm = Slurm(bed)
    a = bed["a"]
    run = tmp_path / "run"
    log = tmp_path / "digits-1.log"
    calm = tmp_path / "calm"
    calm.mkdir()
    for folder in (tmp_path, calm):
        (folder / "task.py").write_text(TASK)
    (tmp_path / "slow").touch()
    (tmp_path / "setup.sh").write_text('echo "setup in $BASH" >&2\n')
    flags = ["--nodes", "2", "--procs", "1", "--setup", "setup.sh", "--srun-flags=--mpi=none"]
    words = [*TRAIN, "--checkpoint.writers", "nodes", "--run", "run", "--fresh"]
    said = submit(a, slurm, tmp_path, *flags, *words)
    assert said == (
        "drumline: note: 1 core for each node, one for each rank; --cpus N gives more to workers that load data\n"
        "drumline: submitted digits.sbatch as job 1\n  log      digits-1.log\n"
        "  follow   squeue --job 1; tail -F digits-1.log\n"
        "  pause    scancel --signal=USR1 1    (it saves, and is requeued)\n"
        "  cancel   scancel 1\n"
    )
    processes.wait_until(lambda: "train" in kinds(run), "steps", timeout_s=120)
    push_aside = [
        "sbatch",
        "--parsable",
        "-p",
        "urgent",
        "-N2",
        "-o",
        "/dev/null",
        "--wrap",
        "true",
    ]
    urgent = a.run(*push_aside, env=slurm.environment)
    assert run_ranks(2, train_whole, calm) == [0, 0]  # while the queue waits
    slurm.wait_for(urgent.stdout.strip(), "COMPLETED")
    (tmp_path / "slow").unlink()
    facts = slurm.wait_for("1", "COMPLETED", timeout_s=120)
    assert (facts["Restarts"], facts["ExitCode"]) == ("1", "0:0")
    text = log.read_text()
    assert text.count("preempted by SIGTERM to rank ") == 1, text
    assert "drumline: requeueing job 1 (1 of 1000)\n" in text
    assert text.count("setup in /bin/bash\n") == 2
    assert text.count("resumed at step ") == 1
    assert text.count("done: 40 steps") == 1
    ranks = json.loads((run / "environment.json").read_text())["ranks"]
    assert [(entry["rank"], entry["host"]) for entry in ranks] == [(0, "a"), (1, "b")]
    # the --fresh of the command was for its first start
    assert not list(tmp_path.glob("run.before-*"))

    files = catalog.verify(run / "checkpoints" / "step-00000040").files
    # a share from each host
    assert {f"model-part-0000{rank}.safetensors" for rank in (0, 1)} <= set(files)

    assert digest(run, with_rng=True) == digest(calm / "whole", with_rng=True)


def train_whole(folder: Path) -> int:
    """The same command as one of two ranks, which nobody disturbs."""
    os.chdir(folder)
    return train_command.run([*TRAIN, "--run", "whole", "--log.display", "none"])


def wait_for_starts(log: Path) -> None:
    both = lambda: log.exists() and log.read_text().count("start 1 of rank") == 2  # noqa: E731
    processes.wait_until(both, f"both ranks in {log}", timeout_s=120)


def kinds(run: Path) -> list[str]:
    file = run / "events" / "rank-00001.jsonl"
    return [event["kind"] for event in read_events(file)] if file.exists() else []


# S3 on this host: once a file is there, each answer takes as many seconds as the argument says, or
# nobody listens.
STORE = """
import sys, time
from pathlib import Path
from tests.store_server import Proxy, moto_server, new_bucket
fault = sys.argv[1]
broken = Path("broken")
with moto_server() as server, new_bucket(server) as bucket:
    with Proxy(server, lambda method, path: float(fault) if broken.exists() else None) as proxy:
        Path("store.partial").write_text(f"{proxy.url} {bucket.url}")
        Path("store.partial").rename("store")
        while fault != "dead" or not broken.exists():
            time.sleep(0.1)
"""


@pytest.mark.soak
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("3600", id="hung"),
        pytest.param("3", id="slow"),
        pytest.param("dead", id="dead"),
    ],
)
def test_a_preempted_job_is_requeued_whatever_its_mirror_does(
    make_testbed: MakeTestbed, tmp_path: Path, fault: str
) -> None:
    bed = make_testbed("a", "b", warm=True)
    slurm = Slurm(bed)
    a = bed["a"]
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "store.py").write_text(STORE)
    (tmp_path / "slow").touch()
    store = a.start(a.python, "store.py", fault, env={"PYTHONPATH": str(ROOT)}, cwd=tmp_path)
    processes.wait_until((tmp_path / "store").exists, "the store", timeout_s=120)
    endpoint, url = (tmp_path / "store").read_text().split()
    for name, value in environment(endpoint).items():
        slurm.environment[name] = value  # sbatch passes them on
    words = [*TRAIN, "--run", "run", "--checkpoint.mirror", url, "--train.steps", "4000"]
    submit(a, slurm, tmp_path, "--nodes", "2", "--procs", "1", *words)
    processes.wait_until(lambda: "train" in kinds(tmp_path / "run"), "steps", timeout_s=120)
    (tmp_path / "broken").touch()
    if fault == "dead":
        processes.wait_until(lambda: not store.is_running(), "the end of the store", timeout_s=60)
    urgent = a.run(
        "sbatch",
        "--parsable",
        "-p",
        "urgent",
        "-N2",
        "-o",
        "/dev/null",
        "--wrap",
        "true",
        env=slurm.environment,
    )
    slurm.wait_for(urgent.stdout.strip(), "COMPLETED")
    text = (tmp_path / "digits-1.log").read_text()
    assert text.count("preempted by SIGTERM to rank ") == 1, text
    assert "drumline: requeueing job 1 (1 of 1000)\n" in text, text
    assert re.search(rf"the checkpoint of step \d+ is not in the mirror {url}: ", text), text
    assert "failure: " not in text, text
    assert not list(tmp_path.glob("run/diagnoses/*"))
    a.run("scancel", "1", env=slurm.environment)


@pytest.mark.soak
def test_a_script_is_requeued_while_it_is_preempted_and_not_when_it_fails_or_is_cancelled(
    make_testbed: MakeTestbed, tmp_path: Path
) -> None:
    bed = make_testbed("a", "b", warm=True)
    slurm = Slurm(bed)
    a = bed["a"]
    (tmp_path / "script.py").write_text(SCRIPT)
    odd = 'it\'s "$HOME" `id`; #'
    flags = [
        "--nodes",
        "2",
        "--procs",
        "1",
        "--time",
        "10",
        "--sbatch=--comment=from-a-test",
        "--out",
        "my.sbatch",
    ]
    submit(a, slurm, tmp_path, *flags, "script.py", odd)
    log = tmp_path / "script-1.log"
    wait_for_starts(log)
    assert a.run("scancel", "--signal=USR1", "1", env=slurm.environment).returncode == 0
    facts = slurm.wait_for("1", "FAILED")
    assert (facts["Restarts"], facts["ExitCode"], facts["Comment"]) == ("1", "9:0", "from-a-test")
    text = log.read_text()
    assert text.count("heard SIGUSR1") == 2, text
    assert f"start 2 of rank 0 {odd}\n" in text
    assert "script.py failed on rank" in text

    for count in tmp_path.glob("starts-*"):
        count.unlink()
    submit(a, slurm, tmp_path, *flags, "script.py")
    wait_for_starts(tmp_path / "script-2.log")
    a.run("scancel", "2", env=slurm.environment)
    assert slurm.wait_for("2", "CANCELLED")["Restarts"] == "0"

    refused = a.run(
        *(a.python, "-m", "drumline", "launch", "--slurm"),
        "--partition",
        "none",
        "script.py",
        env=slurm.environment,
        cwd=tmp_path,
    )
    assert refused.returncode == 2
    assert (
        "sbatch rejected script.sbatch (exit code 1):\n  - sbatch: error: invalid partition specified: none"
        in refused.stderr
    )

"""Profiles of jobs with one planted bottleneck each: is it named first, and do changes bring what
was predicted?

    make soak-profile        (or: python -m tests.planted_soak --count 3 --only SlowData,TinyBuckets)

On gloo. The slow link is that between two hosts of a testbed (root; left out otherwise).
SyncBatchNorm and waits for a device exist on GPUs only: tests/gpu/test_profile_cuda.py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from drumline.report.profile.advice import advise
from drumline.runs.profile_result import read_profile
from tests.multinode import needs
from tests.multinode.hosts import Testbed

ROOT = Path(__file__).parents[1]
TASKS = ROOT / "tests" / "planted_jobs.py"
HERE = {"SlowData": "data", "TinyBuckets": "bucket_size", "HalfSpeed": "slow_rank"}
TRIED = {"SlowData": "data.workers", "TinyBuckets": "dist.bucket_cap_mb"}
MBIT = 200


def profile(task: str, folder: Path, *words: str) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "drumline",
        "profile",
        f"{TASKS}:{task}",
        "--procs",
        "2",
        "--run",
        str(folder),
    ]
    done = subprocess.run(
        [*command, "--json", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def check_here(task: str, folder: Path) -> bool:
    """Profile a job on this machine, and try the change, if it has one that is to be tried."""
    document = profile(task, folder, *(["--try"] if task in TRIED else []))
    named = [advice["bottleneck"] for advice in document["advice"]]
    is_right = named[:1] == [HERE[task]]
    print(
        f"{task}: named {', '.join(named) or 'nothing'}: {'right' if is_right else 'WRONG'}",
        flush=True,
    )
    for trial in document.get("trials", []):
        if TRIED[task] in trial["settings"]:
            low, high = trial["band"]
            is_as_predicted = low <= trial["ratio"] <= high
            is_right = is_right and is_as_predicted
            print(
                f"  {trial['settings']}: step x {trial['ratio']:.2f} (runs {trial['spread'][0]:.2f} to "
                f"{trial['spread'][1]:.2f}), predicted {trial['predicted']:.2f} ({low:.2f} to {high:.2f}): "
                f"{'as predicted' if is_as_predicted else 'NOT as predicted'}",
                flush=True,
            )
    return is_right


def check_slow_link(folder: Path) -> bool:
    """Two hosts with a rank each, and a link of 200 Mbit/s between them."""
    with Testbed(folder / "bed", ["a", "b"]) as bed:
        for host in bed:
            host.set_bandwidth(MBIT)
        jobs = []
        for rank, host in enumerate(bed):
            file = folder / f"{host.name}.env"
            file.write_text(
                f"NUMBER_OF_NODES=2\nNODE_RANK={rank}\nNUMBER_OF_GPUS=1\nMASTER_ADDR={bed.hosts[0].address}\n"
                "MASTER_PORT=29500\nGLOO_SOCKET_IFNAME=eth0\n"
            )
            words = (
                "--run",
                str(folder / "run"),
                "--log.profile",
                "3:8",
                "--train.steps",
                "9",
                "--log.display",
                "none",
            )
            launch = (host.python, "-m", "drumline", "launch", "--env-file", str(file))
            task = f"{TASKS}:LargeGradients"
            jobs.append(host.start(*launch, task, *words, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}))
        codes = [job.wait(180) for job in jobs]
        assert codes == [0, 0], "\n".join(job.text() for job in jobs)
    result = read_profile(folder / "run")
    named = [advice.bottleneck for advice in advise(result)]
    is_right = named[:1] == ["network"]
    print(
        f"LargeGradients over {MBIT} Mbit/s: named {', '.join(named)}: {'right' if is_right else 'WRONG'}",
        flush=True,
    )
    return is_right


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1, help="how often each job is profiled")
    parser.add_argument("--only", default="", help="these jobs, separated by commas")
    options = parser.parse_args()
    chosen = set(options.only.split(",")) if options.only else {*HERE, "LargeGradients"}
    results = []
    for _ in range(options.count):
        for task in [*HERE, "LargeGradients"]:
            if task not in chosen:
                continue
            if task == "LargeGradients" and (reason := needs.missing()):
                print(f"{task}: left out: {reason}")
                continue
            with tempfile.TemporaryDirectory(prefix="planted-") as folder:
                run = Path(folder) / "profile"
                results.append(
                    check_here(task, run) if task in HERE else check_slow_link(Path(folder))
                )
    print(f"{sum(results)} of {len(results)} are right")
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())

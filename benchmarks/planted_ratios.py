"""What each planted bottleneck costs: the time of a step with it and without it, no profiler.

    python -m benchmarks.planted_ratios benchmarks/planted/open [--only NAME] [--device cuda]

Each job runs on two ranks, in turn with and without its plant (PLANTED=off). Ranks are forked from
this process, which has imported torch, so that a run takes seconds. On a GPU both share one. The
ratio, the median of the pairs, is written to cases.json.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import runpy
import socket
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path

from benchmarks.planted_cases import PlantedCase, read_cases, select, write_cases

RANKS = 2
LIMIT_S = 120.0


def main() -> int:
    options = parsed()
    os.environ.update(OMP_NUM_THREADS="1", STEPS=str(options.steps))
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch.distributed  # noqa: F401  # after the number of threads is set

    import drumline.cli.train_command
    import drumline.cli.train_rank  # noqa: F401

    cases = read_cases(options.folder)
    for case in select(cases, options.only, options.device):
        if case.is_healthy:
            continue
        ratio = measured(case, options)
        print(f"{case.name:32} {'failed' if ratio is None else f'{ratio:.2f}'}", flush=True)
        if ratio is not None:
            changed = {**case.ratio, options.device: round(ratio, 2)}
            cases[cases.index(case)] = dataclasses.replace(case, ratio=changed)
            write_cases(options.folder, cases)
    return 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--pairs", type=int, default=1)
    return parser.parse_args()


def measured(case: PlantedCase, options: argparse.Namespace) -> float | None:
    ratios = []
    for _ in range(options.pairs):
        planted_s = step_time(case, options, planted=True)
        healthy_s = step_time(case, options, planted=False)
        if planted_s is None or healthy_s is None:
            return None
        print(f"  {1000 * planted_s:.0f} ms, {1000 * healthy_s:.0f} ms without", flush=True)
        ratios.append(planted_s / healthy_s)
    return statistics.median(ratios)


def step_time(case: PlantedCase, options: argparse.Namespace, *, planted: bool) -> float | None:
    """Seconds of a step on the slower clock of a whole run, or None if a rank failed."""
    os.environ["PLANTED"] = "on" if planted else "off"
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        ranks = [fork_rank(rank, port, case, options, Path(folder)) for rank in range(RANKS)]
        succeeded = wait_for(ranks)
        output = (Path(folder) / "rank-0.txt").read_text()
        if not succeeded:
            print(output[-2000:], file=sys.stderr)
            return None
        return seconds_of_step(case, output, Path(folder))


def seconds_of_step(case: PlantedCase, output: str, folder: Path) -> float:
    if case.is_task:
        lines = (folder / "run/events/rank-00000.jsonl").read_text().splitlines()
        end = next(event for event in map(json.loads, lines) if event["kind"] == "end")
        return end["seconds"] / end["step"]
    steps, seconds = re.findall(r"done: (\d+) steps in ([\d.]+) s", output)[-1]
    return float(seconds) / int(steps)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fork_rank(
    rank: int, port: int, case: PlantedCase, options: argparse.Namespace, folder: Path
) -> int:
    process = os.fork()
    if process:
        return process
    os.setsid()
    output = os.open(folder / f"rank-{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        LOCAL_RANK=str(rank if options.device == "cpu" else 0),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    if options.device == "cuda":
        os.environ.update(NCCL_HOSTID=f"h{rank}", NCCL_SOCKET_IFNAME="lo", LOCAL_WORLD_SIZE="1")
    code = 1
    try:
        code = run_job(case, options, folder)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_job(case: PlantedCase, options: argparse.Namespace, folder: Path) -> int:
    if not case.is_task:
        sys.path.insert(0, str(options.folder.resolve()))
        runpy.run_path(str(options.folder / case.job), run_name="__main__")
        return 0
    from drumline.cli import main as drumline

    task = str(options.folder.resolve() / case.job)
    settings = ["--dist.device", options.device, "--watch.sidecar", "off"]
    return drumline(["train", task, "--run", str(folder / "run"), *settings])


def wait_for(ranks: list[int]) -> bool:
    """Waits for all ranks, ends those that take too long, and returns whether all succeeded."""
    deadline = time.monotonic() + LIMIT_S
    running = set(ranks)
    succeeded = True
    while running:
        for process in list(running):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                running.discard(process)
                succeeded &= status == 0
        if running and (not succeeded or time.monotonic() > deadline):
            succeeded = False
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process, 9)
        time.sleep(0.05)
    return succeeded


if __name__ == "__main__":
    sys.exit(main())

"""What the watch costs: one beat, all beats of a step, and a run that is watched against one that is not.

    make bench-watch        (or: python benchmarks/beats.py --pairs 8 --steps 200)

Beats are timed in blocks, by the processor's time, on two ranks with a group and a record in shared memory; that a step
has as many of them as are timed here is seen in the record of real steps. Runs are whole `drumline train` commands on
two ranks, with `--watch.sidecar on` and `off` in turn, each going first in every other pair. A run's step is the median
over its log lines; printed are medians over runs and over the ratios of pairs. Spread is the middle half.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from side_by_side import STEPS_PER_BLOCK, WORK, engine_steps, start_ranks, time_block

from drumline.config.schema import CheckpointConfig, Config, LogConfig, TrainConfig
from drumline.config.write import to_toml
from drumline.distributed.group import collective_counter
from drumline.manager import DDPManager
from drumline.metrics.events import read_events
from drumline.watch.beats.phase import BACKWARD, DATA, FORWARD, OPTIMIZER
from drumline.watch.beats.record import BeatWriter, read_beat

NAME = "MiniResNet 16-32-64, batch 32"
RANKS = 2
GOAL_US, GOAL_RATIO = 5.0, 1.005
BEATS_PER_BLOCK = 5_000
MARKS_PER_STEP = 4
STEPS_PER_LINE = 5
SIGN_OF_A_SIDECAR = "watch/status.json"


def marks(beat: BeatWriter, num_collectives: Callable[[], int]) -> None:
    for _ in range(BEATS_PER_BLOCK):
        beat.mark(FORWARD)


def steps(beat: BeatWriter, num_collectives: Callable[[], int]) -> None:
    """The beats of engine/step.py and engine/loop.py in steps of one micro-batch."""
    for step in range(BEATS_PER_BLOCK):
        beat.next_micro()
        beat.mark(FORWARD)
        beat.mark(BACKWARD)
        beat.mark(OPTIMIZER)
        beat.count_collectives(num_collectives())
        beat.begin_step(step)
        beat.mark(DATA)


def time_beats(ddp: DDPManager, path: Path, rounds: int) -> None:
    beat, num_collectives = BeatWriter(path), collective_counter()
    times: dict[str, list[float]] = {"a mark": [], "a step's beats": []}
    for _ in range(rounds):
        for name, beats in zip(times, (marks, steps), strict=True):
            begun = time.thread_time()
            beats(beat, num_collectives)
            times[name].append((time.thread_time() - begun) / BEATS_PER_BLOCK * 1e6)
    if ddp.is_main_process():
        for name, taken in times.items():
            print(f"{name:<16} {described(taken, 3)} us, n = {rounds} blocks of {BEATS_PER_BLOCK}")
        told("a step's beats", times["a step's beats"], GOAL_US, "us")


def count_marks(ddp: DDPManager, path: Path) -> None:
    """Those of real steps, by their record."""
    ddp._beat = BeatWriter(path)
    taken = engine_steps(ddp, WORK[NAME])
    time_block(taken)  # the first one also has those of the start
    first = read_beat(path)
    time_block(taken)
    second = read_beat(path)
    assert first is not None
    assert second is not None
    assert second.beats - first.beats == MARKS_PER_STEP * STEPS_PER_BLOCK, "steps() is not what a step does"


def run_rank(rounds: int) -> None:
    # DDP finds the strides of a 1x1 convolution's gradient odd; there is nothing to it.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    shared = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder,
        DDPManager(seed=0, device="cpu") as ddp,
    ):
        count_marks(ddp, Path(folder) / "steps.beat")
        time_beats(ddp, Path(folder) / "rank.beat", rounds)


def config_of_run(num_steps: int) -> Config:
    work = WORK[NAME]
    return replace(
        work,
        train=TrainConfig(batch_size=work.train.batch_size, steps=num_steps, eval_every_epochs=0),
        checkpoint=CheckpointConfig(every_epochs=0),
        log=LogConfig(every_steps=STEPS_PER_LINE, display="none"),
    )


def step_of_run(config: Path, run: Path, sidecar: str) -> float:
    """Milliseconds, by the log lines of a whole run; the first ones are left out."""
    command = ["train", "synthetic", "--config", str(config), "--procs", str(RANKS), "--run", str(run)]
    threads = str(max(1, (os.cpu_count() or 1) // RANKS))
    subprocess.run(
        [sys.executable, "-m", "drumline", *command, "--dist.device", "cpu", "--watch.sidecar", sidecar],
        env={**os.environ, "OMP_NUM_THREADS": threads, "PYTHONWARNINGS": "ignore"},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    # Else the two would differ in nothing, and their ratio would say nothing.
    assert (run / SIGN_OF_A_SIDECAR).exists() == (sidecar == "on"), f"--watch.sidecar {sidecar} had no effect"
    lines = [event for event in read_events(run / "events/rank-00000.jsonl") if event["kind"] == "train"]
    batch_size = WORK[NAME].train.batch_size or 0
    return statistics.median(batch_size / line["samples_per_s"] for line in lines[2:]) * 1e3


def compare_runs(pairs: int, num_steps: int) -> None:
    times: dict[str, list[float]] = {"off": [], "on": []}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.toml"
        config.write_text(to_toml(config_of_run(num_steps)))
        for pair in range(pairs):
            for sidecar in ("off", "on") if pair % 2 else ("on", "off"):
                times[sidecar].append(step_of_run(config, Path(folder) / f"{pair}-{sidecar}", sidecar))
    ratios = [on / off for on, off in zip(times["on"], times["off"], strict=True)]
    print(f"{NAME}, {RANKS} ranks, n = {pairs} pairs of runs of {num_steps} steps")
    for name, taken in times.items():
        print(f"  watch {name:<10} {described(taken, 2)} ms a step")
    print(f"  {'on / off':<16} {described(ratios, 4)}")
    told("on / off", ratios, GOAL_RATIO, "")


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The median between the ends of the middle half."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else [*values] * 3
    return low, middle, high


def described(values: Sequence[float], digits: int) -> str:
    low, middle, high = quartiles(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def told(what: str, values: Sequence[float], goal: float, unit: str) -> None:
    low, middle, high = quartiles(values)
    verdict = "met" if middle <= goal else "MISSED"
    doubt = " (by the median; the middle half lies on both sides of it)" if low <= goal < high else ""
    print(f"the goal for {what}, at most {goal:g}{unit and ' ' + unit}, is {verdict}{doubt}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30, help="blocks of beats [30]")
    parser.add_argument("--pairs", type=int, default=12, help="pairs of runs; 0: beats alone [12]")
    parser.add_argument("--steps", type=int, default=150, help="steps of a run [150]")
    options = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(options.rounds)
        return
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}, {versions}"
    )
    start_ranks(RANKS, "--rounds", str(options.rounds))
    if options.pairs:
        compare_runs(options.pairs, options.steps)


if __name__ == "__main__":
    main()

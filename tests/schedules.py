"""Random schedules of kills and resumes, each compared bit for bit with an uninterrupted run.

    python -m tests.schedules --count 300        (make soak-exact)

A schedule is decided by its number alone. In the elastic mode the numbers of ranks differ from leg
to leg and the uninterrupted run has one rank; in the default mode all have the same number.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from threading import Lock

import torch

from drumline.config.schema import CheckpointConfig, Config, DistConfig, OptimConfig
from drumline.report.verify.run_check import verify_run
from drumline.report.verify.samples import read_history
from drumline.report.verify.section import Section
from drumline.training.tasks.base import Task
from tests.faults import AT_A_SAVE, AT_AN_EPOCH_END, PHASES, Fault, die_at
from tests.jobs import Everything, make_config, newest, train_on
from tests.ranks import RanksFailed, run_ranks
from tests.stream_jobs import EverythingStream

SAMPLES = 102
BATCH = 48
EPOCHS = 3
# of 48, 48 and 6 samples: of these 6 the last of four ranks gets none
STEPS_PER_EPOCH = 3
STEPS = EPOCHS * STEPS_PER_EPOCH
FILES_OF_A_CHECKPOINT = 7
CUTS = (
    {"accumulate": 1},
    {"accumulate": 2},
    {"accumulate": 3},
    {"accumulate": 4},
    {"micro_batch_size": 3},
)


@dataclass(frozen=True)
class Setup:
    """What is trained, and how; the reference has the same."""

    exact: str
    task: type[Task]
    cut: int
    shards: int
    static_graph: bool

    def config(self, *, workers: int, every_steps: int) -> Config:
        length = {"steps": STEPS} if self.task is EverythingStream else {"epochs": EPOCHS}
        config = make_config(
            batch_size=BATCH,
            samples=SAMPLES,
            dropout=0.3,
            augment=True,
            workers=workers,
            exact=self.exact,
            shards=self.shards,
            optim=OptimConfig(
                name="adamw", lr=0.01, schedule="cosine", warmup_steps=3, clip_norm=0.7
            ),
            checkpoint=CheckpointConfig(every_steps=every_steps),
            **length,
            **CUTS[self.cut],
        )
        # Buckets small enough that there are several.
        return replace(
            config, dist=DistConfig(static_graph=self.static_graph, bucket_cap_mb=0.0005)
        )


@dataclass(frozen=True)
class Schedule:
    """Legs on so many ranks; each but the last is killed."""

    number: int
    setup: Setup
    worlds: tuple[int, ...]
    faults: tuple[Fault, ...]
    workers: int
    every_steps: int


def make_schedule(number: int, *, legs: int | None = None) -> Schedule:
    """The schedule of that number; of two or three legs, unless told."""
    chance = random.Random(number)
    exact = ("elastic", "world")[number % 2]
    setup = Setup(
        exact=exact,
        task=chance.choice((Everything, Everything, EverythingStream)),
        cut=chance.randrange(len(CUTS)),
        shards=chance.choice((4, 6)) if exact == "elastic" else 4,
        static_graph=exact == "world" and chance.random() < 0.25,
    )
    legs = legs or chance.choice((2, 2, 3))
    worlds = [chance.choice((1, 2, 3, 4)) for _ in range(legs)]
    if exact == "world":
        worlds = [worlds[0]] * legs
    every_steps = chance.choice((1, 2))
    # Every phase gets its turn; the later legs of a schedule are killed later.
    phases = [PHASES[(number // 2 + leg) % len(PHASES)] for leg in range(legs - 1)]
    faults = _faults(phases, worlds, setup, every_steps, chance)
    while any(later.step <= earlier.step for earlier, later in pairwise(faults)):
        # one that the leg before has left behind
        faults = _faults(phases, worlds, setup, every_steps, chance)
    return Schedule(
        number, setup, tuple(worlds), tuple(faults), chance.choice((0, 0, 2)), every_steps
    )


def _faults(
    phases: list[str], worlds: list[int], setup: Setup, every_steps: int, chance: random.Random
) -> list[Fault]:
    steps = sorted(chance.sample(range(1, STEPS), len(phases)))
    return [
        _fault(phase, step, world, setup, every_steps, chance)
        for phase, step, world in zip(phases, steps, worlds, strict=False)
    ]


def _fault(
    phase: str, step: int, world_size: int, setup: Setup, every_steps: int, chance: random.Random
) -> Fault:
    rank = chance.randrange(world_size)
    if phase in AT_AN_EPOCH_END:
        return Fault(phase, -(-step // STEPS_PER_EPOCH) * STEPS_PER_EPOCH, rank)
    if phase in AT_A_SAVE:
        step = -(-step // every_steps) * every_steps
        of_any = phase in ("gather", "saved")
        after = chance.randrange(FILES_OF_A_CHECKPOINT) if phase == "write" else 0
        return Fault(phase, step, rank if of_any else 0, after)
    in_micro_batches = phase in ("data", "forward", "backward")
    # the short batch: only rank 0 is sure to have some of it
    if step % STEPS_PER_EPOCH == 0:
        return Fault(phase, step, 0)
    pieces = CUTS[setup.cut].get("accumulate", 1)
    return Fault(phase, step, rank, chance.randrange(pieces) if in_micro_batches else 0)


def run_schedule(schedule: Schedule, run: Path) -> str:
    """All legs of a schedule; returns the digest of what it trained."""
    setup = schedule.setup
    config = setup.config(workers=schedule.workers, every_steps=schedule.every_steps)
    for world_size, fault in zip(schedule.worlds, schedule.faults, strict=False):
        try:
            run_ranks(world_size, die_at, fault, config, setup.task, run)
        except RanksFailed as failed:
            if failed.errors.get(fault.rank) != "the process ended without a word":
                raise
        else:
            raise AssertionError(f"nothing was killed by {fault}")
    train_on(schedule.worlds[-1], config, setup.task, run)
    return digest(run, with_rng=setup.exact == "world")


def digest(run: Path, *, with_rng: bool = False) -> str:
    """SHA-256 of weights, optimizer, scaler and progress of a run's last checkpoint, and of its
    ledger; the run is verified. The random state of ranks has a meaning on the same number of them
    only."""
    checkpoint = newest(run)
    whole = hashlib.sha256(covered(run).encode())
    for file in ("model", "optimizer", *(["rng"] if with_rng else [])):
        for name, tensor in sorted(checkpoint.tensors[file].items()):
            whole.update(f"{file} {name} {tensor.dtype} {list(tensor.shape)}".encode())
            whole.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    progress = {name: checkpoint.documents["progress"][name] for name in ("step", "cursor")}
    documents = [progress, checkpoint.documents["optimizer"], checkpoint.documents.get("scaler")]
    whole.update(json.dumps(documents, sort_keys=True).encode())
    return whole.hexdigest()


def covered(run: Path) -> str:
    """What a run trained on, by the ledger: which positions of which epoch in which steps, whoever
    had them."""
    report = verify_run(run, progress=lambda line: None)
    assert not report.problems, report.problems
    history = read_history(run / "ledger.jsonl", Section("samples"))
    steps = [
        (piece.epoch, piece.low + number * piece.stride, piece.stride)
        for piece in history.pieces
        for number in range(piece.last - piece.first + 1)
    ]
    return json.dumps(steps)


class References:
    """Digests of the runs that nobody interrupted, each made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._digests: dict[tuple[Setup, int], str] = {}
        self._lock = Lock()

    def digest_for(self, schedule: Schedule) -> str:
        setup = schedule.setup
        world_size = 1 if setup.exact == "elastic" else schedule.worlds[0]
        with self._lock:
            if (setup, world_size) not in self._digests:
                whole = Schedule(0, setup, (world_size,), (), 0, 0)
                run = self._folder / f"reference-{len(self._digests)}"
                self._digests[setup, world_size] = run_schedule(whole, run)
            return self._digests[setup, world_size]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=300, help="how many schedules [300]")
    parser.add_argument("--first", type=int, default=0, help="the number of the first [0]")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time [2]")
    options = parser.parse_args()
    schedules = [make_schedule(options.first + number) for number in range(options.count)]
    started = time.monotonic()
    results = Counter[tuple[str, bool]]()
    with (
        tempfile.TemporaryDirectory(prefix="drumline-soak-") as folder,
        ThreadPoolExecutor(options.jobs) as pool,
    ):
        references = References(Path(folder))

        def is_same(schedule: Schedule) -> bool:
            run = Path(folder) / str(schedule.number)
            is_same = run_schedule(schedule, run) == references.digest_for(schedule)
            shutil.rmtree(run)
            return is_same

        for schedule, same in zip(schedules, pool.map(is_same, schedules), strict=True):
            results[schedule.setup.exact, same] += 1
            if not same:
                print(f"different: {schedule}", flush=True)
            if results.total() % 20 == 0:
                print(f"{results.total()} of {options.count}", flush=True)
    kills = Counter(fault.phase for schedule in schedules for fault in schedule.faults)
    for exact in ("elastic", "world"):
        print(
            f"{exact:<8} {results[exact, True]:>4} schedules the same, {results[exact, False]} different"
        )
    print(f"kills    {', '.join(f'{phase} {kills[phase]}' for phase in PHASES)}")
    print(f"time     {(time.monotonic() - started) / 60:.0f} min")
    return int(any(not is_same for _, is_same in results))


if __name__ == "__main__":
    sys.exit(main())

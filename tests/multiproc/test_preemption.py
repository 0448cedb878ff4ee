"""A run that is preempted by a signal saves, its ranks exit together, and resumed it is the same
run."""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drumline.base.errors import ExitCode
from drumline.base.startup import SAME_SIGNAL_S
from drumline.checkpoint import store
from drumline.config.schema import CheckpointConfig, Config, DistConfig, OptimConfig, WatchConfig
from drumline.report.verify.run_check import verify_run
from drumline.runs import catalog
from drumline.runs.events import read_events
from drumline.training import loop
from drumline.training import run as engine
from drumline.training.between_steps.preemption import Preemption
from drumline.training.between_steps.saver import Saver
from drumline.training.job.job import Progress, make_manager
from drumline.training.loop import Loop
from drumline.training.run_context import RunRequest
from tests.jobs import Everything, make_config, train_on
from tests.ranks import RanksFailed, run_ranks
from tests.schedules import digest

STEPS = 70
ADAM = OptimConfig(name="adamw", lr=0.01, schedule="cosine", warmup_steps=3, clip_norm=1.0)


def config(*, workers: int = 0) -> Config:
    """Dropout, augmentation, BatchNorm, a schedule, several buckets: whatever could differ in the
    last bit."""
    made = make_config(
        dropout=0.3,
        augment=True,
        optim=ADAM,
        steps=STEPS,
        workers=workers,
        checkpoint=CheckpointConfig(every_epochs=0),
        eval_every_epochs=3,
    )
    return replace(
        made, dist=DistConfig(bucket_cap_mb=0.0005, start_timeout_s=60, train_timeout_s=30)
    )


def told(
    where: str, ranks: tuple[int, ...], number: int, config: Config, run: Path
) -> tuple[int, int, bool]:
    """Train as one rank, and send these ranks a signal at that point; how and where it ended,
    whether reported."""
    preemption = Preemption()
    progress = Progress()
    sent = []
    ddp = make_manager(config)

    def send() -> None:
        if not sent and ddp.rank in ranks:
            os.kill(os.getpid(), number)
        sent.append(number)

    take_step = Loop.take_step

    def slowly(self: Loop, *args: Any) -> None:
        time.sleep(0.05)  # so that a second of steps is a small part of the run
        take_step(self, *args)
        if where == "step" and self.progress.step == 5:
            send()

    def behind(function: Callable[..., Any]) -> Callable[..., Any]:
        def sending(*args: Any, **options: Any) -> Any:
            result = function(*args, **options)
            send()
            return result

        return sending

    Loop.take_step = slowly  # type: ignore[method-assign]
    if where == "evaluation":
        loop.evaluate = behind(loop.evaluate)
    if where == "warm-up":
        engine.warm_up = behind(engine.warm_up)
    preemption.listen(prints=ddp.rank == 0)
    ddp.setup()
    preemption.join(ddp, progress)
    code = engine.TrainingRun(
        RunRequest("test", config, run, False, ("test",)), Everything, ddp, progress, preemption
    ).train()
    preemption.close()
    ddp.cleanup()
    return code, progress.step, bool(sent)


WholeRuns = Callable[[int], str]


@pytest.fixture(scope="module")
def whole_runs(tmp_path_factory: pytest.TempPathFactory) -> WholeRuns:
    """Digests of uninterrupted runs, by their number of ranks."""

    @functools.cache
    def digest_of(world_size: int) -> str:
        run = tmp_path_factory.mktemp("whole") / "run"
        train_on(world_size, config(), Everything, run)
        return digest(run, with_rng=True)

    return digest_of


@pytest.mark.parametrize(
    ("world_size", "where", "ranks", "number"),
    [
        (2, "step", (1,), signal.SIGUSR1),
        pytest.param(2, "evaluation", (0, 1), signal.SIGTERM, marks=pytest.mark.soak),
        pytest.param(2, "warm-up", (1,), signal.SIGTERM, marks=pytest.mark.soak),
    ],
)
def test_preempted_and_resumed_is_the_same_run(
    tmp_path: Path,
    whole_runs: WholeRuns,
    world_size: int,
    where: str,
    ranks: tuple[int, ...],
    number: int,
) -> None:
    workers = 1 if where == "step" else 0
    run = tmp_path / "told"
    # which has signals of its own for a rank
    beside_a_sidecar = replace(config(workers=workers), watch=WatchConfig())
    ends = run_ranks(world_size, told, where, ranks, number, beside_a_sidecar, run)
    assert [end[0] for end in ends] == [ExitCode.PREEMPTED] * world_size
    (step,) = {end[1] for end in ends}
    marker = json.loads((run / "preempted.json").read_text())
    assert marker["step"] == step
    assert marker["signal"] == signal.Signals(number).name
    assert marker["rank"] in ranks
    assert step < STEPS
    saved = run / "checkpoints" / f"step-{step:08d}"
    assert catalog.newest_valid(run / "checkpoints").path == (saved if step else None)
    for rank in range(world_size):
        last = list(read_events(run / "events" / f"rank-{rank:05d}.jsonl"))[-1]
        assert (last["kind"], last["step"], last["about_rank"]) == (
            "preempted",
            step,
            marker["rank"],
        )

    train_on(world_size, config(), Everything, run)
    assert digest(run, with_rng=True) == whole_runs(world_size)
    assert not (run / "preempted.json").exists()


def told_while_a_save_is_written(config: Config, run: Path) -> tuple[int, int, list[bool]]:
    """No save is done before the next is asked for, but that with which the run leaves. Also:
    whether one was being written, each time that one was asked for."""
    write = store.write
    skips = Saver._skips
    asked_for = 0.0
    writing = []

    def write_late(root: Path, step: int, **content: Any) -> Path:
        # if the run leaves at the step of this save, no other is asked for
        deadline = time.monotonic() + 8
        while asked_for <= step and time.monotonic() < deadline:
            time.sleep(0.01)
        return write(root, step, **content)

    def ask(self: Saver, step: int, metrics: Any, *, must_save: bool) -> bool:
        nonlocal asked_for
        writing.append(self.writer.is_busy)
        asked_for = math.inf if must_save else step
        return skips(self, step, metrics, must_save=must_save)

    store.write = write_late
    Saver._skips = ask
    code, step, _ = told("step", (0,), signal.SIGTERM, config, run)
    return code, step, writing


@pytest.mark.soak
def test_preempted_while_a_save_is_written_it_waits_for_it_and_saves_again(tmp_path: Path) -> None:
    saves = replace(
        config(), checkpoint=CheckpointConfig(every_steps=4, every_epochs=0, keep_last=50)
    )
    [(code, step, writing)] = run_ranks(1, told_while_a_save_is_written, saves, tmp_path)
    assert code == ExitCode.PREEMPTED
    assert writing == [False, *[True] * (len(writing) - 1)]
    assert len(writing) > 1
    saved = [*range(4, step, 4), step]
    told_of = [
        (event["kind"], event["step"])
        for event in read_events(tmp_path / "events" / "rank-00000.jsonl")
        if event["kind"] in ("checkpoint", "preempted")
    ]
    assert told_of == [*(("checkpoint", each) for each in saved), ("preempted", step)]
    assert catalog.list_steps(tmp_path / "checkpoints") == saved
    assert verify_run(tmp_path, lambda text: None).problems == []


def signalled_twice(config: Config, run: Path) -> None:
    """The only rank in a collective gets a signal, and another one that counts as the second."""
    preemption = Preemption()
    progress = Progress()
    ddp = make_manager(config)
    preemption.listen(prints=False)
    ddp.setup()
    preemption.join(ddp, progress)
    if ddp.rank == 1:
        shared = ddp.connection.store
        # until rank 0, which runs the store, is gone
        while shared is not None and not shared.check(["never"]):
            time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)
    # counts as the same signal: a launcher that passes it on
    os.kill(os.getpid(), signal.SIGTERM)
    while not preemption.is_asked:
        time.sleep(0.01)
    Path(f"{run}.asked").touch()
    if os.fork() == 0:
        time.sleep(SAME_SIGNAL_S + 0.2)
        rank = os.getppid()
        os.kill(rank, signal.SIGUSR1)  # passed on late: no second wish
        time.sleep(0.3)
        if os.getppid() == rank:
            Path(f"{run}.patient").touch()
            os.kill(rank, signal.SIGTERM)
        os._exit(0)
    ddp.barrier()  # never ends: no handler of Python's would ever run


def test_a_second_signal_ends_a_rank_at_once_in_the_middle_of_a_collective(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, signalled_twice, config(), tmp_path / "run", timeout_s=60)
    assert caught.value.errors[0] == "the process ended without a word"
    assert (tmp_path / "run.asked").exists()
    assert (tmp_path / "run.patient").exists()

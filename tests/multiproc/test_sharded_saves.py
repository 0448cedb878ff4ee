"""Checkpoints of a sharded model, of which every rank writes a part, when one rank is slow, or
cannot write at all."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from drumline.checkpoint import store
from drumline.config.schema import CheckpointConfig, Config
from drumline.runs import catalog
from drumline.training.loop import Loop
from tests.jobs import assert_same_bits, newest, train_here, train_on
from tests.multiproc.test_sharded_modes import NoBuffers, config_of, events_of, in_mode
from tests.ranks import run_ranks

EVERY_STEP = CheckpointConfig(every_steps=1, every_epochs=0, keep_last=50, keep_best=0)
NEW_MOUNTS = 0x20000
READ_ONLY = 1
REMOUNT = 32
BIND = 4096
PRIVATE = (1 << 18) | 16384
_libc = ctypes.CDLL(None, use_errno=True)


def slow_on_one_rank(config: Config, folder: Path) -> None:
    """The same run with saves that each step waits for, then with background saves of which rank
    1's part is late: by 0.2 s, then until the save after step 2 was due."""
    waits = replace(config, checkpoint=replace(EVERY_STEP, background=False))
    train_here(waits, NoBuffers, folder / "waits")
    write_tensors = store.write_tensors

    def write_late(*args: Any, **options: Any) -> Any:
        time.sleep(0.2 if dist.get_rank() == 1 else 0.0)
        return write_tensors(*args, **options)

    store.write_tensors = write_late  # type: ignore[assignment]
    train_here(config, NoBuffers, folder / "beside")
    is_after_two = threading.Event()
    take_step = Loop.take_step

    def write_after_two(*args: Any, **options: Any) -> Any:
        assert dist.get_rank() == 0 or is_after_two.wait(60)
        return write_tensors(*args, **options)

    def take(self: Loop, step: Any) -> None:
        if self.progress.step == 2:
            is_after_two.set()
        take_step(self, step)

    store.write_tensors = write_after_two
    Loop.take_step = take
    train_here(
        replace(config, checkpoint=replace(EVERY_STEP, when_busy="skip")),
        NoBuffers,
        folder / "skips",
    )


@pytest.mark.soak
def test_saves_that_follow_each_other_closely_have_the_parts_of_their_own_step(
    tmp_path: Path,
) -> None:
    config = in_mode("fsdp", config_of(steps=4, checkpoint=EVERY_STEP))
    run_ranks(2, slow_on_one_rank, config, tmp_path)
    for step in range(1, 5):
        name = Path("checkpoints") / f"step-{step:08d}"
        waited = store.read(tmp_path / "waits" / name)
        beside = store.read(tmp_path / "beside" / name)
        waited.documents["progress"].pop("facts"), beside.documents["progress"].pop("facts")
        assert_same_bits(waited, beside)
    skipped = [
        event
        for event in events_of(tmp_path / "skips", "note")
        if "skipped the save" in event["message"]
    ]
    saved = [event["step"] for event in events_of(tmp_path / "skips", "checkpoint")]
    assert (saved[0], saved[-1]) == (1, 4)
    assert 2 not in saved
    assert len(saved) + len(skipped) == 4
    # A save that was skipped has left nothing behind, and those that were not are complete on both
    # ranks.
    names = sorted(path.name for path in (tmp_path / "skips" / "checkpoints").iterdir())
    assert names == [f"step-{step:08d}" for step in saved]
    for folder in names:
        catalog.verify(tmp_path / "skips" / "checkpoints" / folder)


def cannot_write_after_two_steps(rank: int, config: Config, run: Path) -> str:
    """Train; after two steps the checkpoints' folder is read-only on one rank, in a mount namespace
    of its own."""
    folder = run / "checkpoints"
    if int(os.environ["RANK"]) == rank:
        mount(_libc.unshare, NEW_MOUNTS)
        mount(_libc.mount, b"none", b"/", None, PRIVATE, None)
        mount(_libc.mount, bytes(folder), bytes(folder), None, BIND, None)
        take_step = Loop.take_step

        def take(self: Loop, step: Any) -> None:
            if self.progress.step == 2:
                mount(_libc.mount, None, bytes(folder), None, REMOUNT | BIND | READ_ONLY, None)
            take_step(self, step)

        Loop.take_step = take  # type: ignore[method-assign]
    try:
        train_here(config, NoBuffers, run)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained to the end"


def mount(call: Callable[..., int], *arguments: Any) -> None:
    if call(*arguments):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@pytest.mark.soak
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a folder read-only for one rank")
def test_a_rank_that_cannot_write_ends_the_run_and_the_last_checkpoint_stays(
    tmp_path: Path,
) -> None:
    """As in ddp, where rank 0 writes; here it is rank 1."""
    config = in_mode("fsdp", config_of(steps=50, checkpoint=replace(EVERY_STEP, background=False)))
    (tmp_path / "checkpoints").mkdir()
    first, second = run_ranks(2, cannot_write_after_two_steps, 1, config, tmp_path)
    assert "could not be saved: " in first
    assert "Read-only file system" in first or "read-only" in first
    assert "is untouched" in first
    assert "try: " in first
    assert "rank 1 on " in first
    assert second != "trained to the end", "the others are told"
    newest_step = catalog.newest_valid(tmp_path / "checkpoints")
    assert newest_step.path is not None
    assert (newest_step.path.name, newest_step.skipped) == ("step-00000002", [])
    train_on(2, replace(config, train=replace(config.train, steps=4)), NoBuffers, tmp_path)
    train_on(
        2, replace(config, train=replace(config.train, steps=4)), NoBuffers, tmp_path / "whole"
    )
    resumed = newest(tmp_path)
    whole = newest(tmp_path / "whole")
    for each_run in (resumed, whole):
        each_run.documents["progress"].pop("facts")
    assert_same_bits(resumed, whole)

"""The writer's thread: a save that succeeds, fails, or is waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from drumline.checkpoint.store import WritingRank
from drumline.checkpoint.writer import CapturedState, CheckpointWriter
from drumline.rank.sealed_store import SealedStore


def make_writer(root: Path) -> CheckpointWriter:
    return CheckpointWriter(
        root, WritingRank(0, "host"), torch.device("cpu"), publish=lambda newest: None
    )


def captured(step: int, complete: Callable[[], object] = lambda: None) -> CapturedState:
    def call() -> None:
        complete()

    live = {"model": {"weight": torch.ones(2)}}
    return CapturedState(step, live, frozen={}, documents={"progress": {}}, complete=call)


def test_a_result_waits_until_it_is_taken(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)
    assert (writer.has_news, writer.is_busy, writer.take()) == (False, False, None)
    gate = threading.Event()
    writer.start(captured(5, gate.wait), copies=True)
    assert writer.is_busy
    assert not writer.has_news
    assert not writer.wait(0.01)
    gate.set()
    assert writer.wait()
    assert writer.has_news
    written = writer.take()
    assert written is not None
    assert (written.step, written.path.name) == (5, "step-00000005")
    assert (writer.has_news, writer.take()) == (False, None)


def test_an_error_is_raised_once_where_it_is_taken(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)

    def fail() -> None:
        raise OSError("no disk")

    writer.start(captured(1, fail), copies=True)
    writer.wait()
    assert writer.has_news
    with pytest.raises(OSError, match="no disk"):
        writer.take()
    assert not writer.has_news
    writer.start(captured(2), copies=True)
    assert writer.take() is not None


def test_other_writers_do_not_wait_for_a_save_that_does_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "drumline.checkpoint.writer.gather_json", lambda value: [["host", 0], ["host", 1]]
    )
    job_store = SealedStore(dist.HashStore(), "a secret")
    writers = []
    for rank in (0, 1):
        writer = CheckpointWriter(
            tmp_path, WritingRank(rank, "host"), torch.device("cpu"), publish=lambda newest: None
        )
        monkeypatch.setattr(SealedStore, "clone", lambda store: store)
        writer.choose_writers("ranks", job_store, local_rank=rank, num_shards=1)
        writers.append(writer)

    def fail() -> None:
        raise OSError("no disk")

    writers[1].start(captured(1), copies=True)
    writers[0].start(captured(1, fail), copies=True)
    with pytest.raises(OSError, match="no disk"):
        writers[0].take()
    is_done = writers[1].wait(timeout_s=5.0)
    writers[1]._end.set()
    assert is_done

"""What happens to a run whose disk fills up, and what a checkpoint of one is good for elsewhere."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drumline import load_checkpoint, runs
from drumline.base.errors import CheckpointError, Place
from drumline.base.untrusted import open_append
from drumline.checkpoint import store
from drumline.config.schema import CheckpointConfig, Config
from drumline.report.verify.run_check import verify_run
from drumline.runs import catalog
from drumline.runs.events import read_events
from drumline.training.failure_report import can_restart, describe_failure, full_disk
from tests.jobs import Classify, assert_same_bits, make_config, newest, train_here, train_on
from tests.ranks import run_ranks


def train_until_the_disk_is_full(config: Config, run: Path) -> str:
    try:
        train_here(config, Classify, run)
    except CheckpointError as error:
        return str(error)
    except Exception as error:  # another rank's word for the same end
        return f"{type(error).__name__}: {error}"
    return "trained to the end"


def test_a_full_disk_ends_the_run_and_keeps_the_last_good_checkpoint(
    small_disk: Callable[..., Path],
) -> None:
    run = small_disk("size=1m") / "run"
    config = make_config(epochs=100, checkpoint=CheckpointConfig(every_steps=1, keep_last=500))
    message, other = run_ranks(2, train_until_the_disk_is_full, config, run)
    assert "could not be saved: " in message
    assert "No space left on device" in message or "full" in message
    assert "is untouched" in message
    assert "try: " in message
    assert other != "trained to the end"
    newest_step = catalog.newest_valid(run / "checkpoints")
    assert newest_step.path is not None
    assert newest_step.skipped == []
    for path in (run / "checkpoints").iterdir():
        if path != newest_step.path:
            store.remove(path)
    resumed_at = catalog.verify(newest_step.path).step
    assert resumed_at > 2
    assert train_on(2, make_config(steps=resumed_at + 1), Classify, run).step == resumed_at + 1
    resumes = [
        e["step"] for e in read_events(run / "events" / "rank-00000.jsonl") if e["kind"] == "resume"
    ]
    assert resumes == [resumed_at]


class FullAt:
    """The ledger's file, on a disk that is full in the middle of a line."""

    def __init__(self, path: Path, *, line: int) -> None:
        self.file = open_append(path)
        self.fileno = self.file.fileno
        self.close = self.file.close
        self.num_left = line

    def write(self, content: bytes) -> int:
        self.num_left -= 1
        if self.num_left == 0:
            return self.file.write(content[:5])
        if self.num_left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.file.write(content)


@pytest.mark.parametrize(("line", "saved"), [(1, []), (2, []), (3, [2])])
def test_a_ledger_that_cannot_be_written_ends_the_run_and_the_launcher_waits_for_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: int, saved: list[int]
) -> None:
    config = make_config(steps=6, checkpoint=CheckpointConfig(every_steps=2, keep_last=9))
    whole, run = tmp_path / "whole", tmp_path / "run"
    train_here(config, Classify, whole)

    def open_on_full_disk(path: Path) -> Any:
        return FullAt(path, line=line) if path.name == "ledger.jsonl" else open_append(path)

    with monkeypatch.context() as on_full_disk:
        on_full_disk.setattr(runs.events, "open_append", open_on_full_disk)
        with pytest.raises(OSError, match="No space") as failed:
            train_here(config, Classify, run)
    ledger = run / "ledger.jsonl"
    text = describe_failure(failed.value, Place("node-a", 0, 4), run=run)
    assert text.startswith(
        f"drumline: error: the disk is full: {ledger} [rank 0 on node-a, step 4]"
    )
    assert full_disk(failed.value, run) == str(run)
    assert not can_restart(failed.value, has_checkpoint=True)
    assert catalog.list_steps(run / "checkpoints") == saved

    train_here(config, Classify, run)
    assert_same_bits(newest(run), newest(whole))
    assert verify_run(run, lambda text: None).problems == []


def test_a_checkpoint_loads_into_a_plain_model_of_ones_own(tmp_path: Path) -> None:
    config = make_config()
    train_on(2, config, Classify, tmp_path)
    model = Classify(config).model()
    optimizer = torch.optim.SGD(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1]},
            {"params": [p for p in model.parameters() if p.ndim <= 1]},
        ],
        lr=1.0,
        momentum=0.9,
    )
    progress = load_checkpoint(tmp_path, model, optimizer)
    assert progress["step"] == 10
    saved = newest(tmp_path)
    assert saved.tensors["model"].keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, saved.tensors["model"][name])
    assert all("module." not in name for name in saved.tensors["model"])


def test_another_model_is_refused_with_every_difference(tmp_path: Path) -> None:
    train_here(make_config(epochs=1), Classify, tmp_path)
    with pytest.raises(
        CheckpointError, match=r"(?s)the checkpoint is of another model.*0\.weight is \[8, 6\]"
    ):
        load_checkpoint(
            tmp_path, nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Identity(), nn.Linear(9, 2))
        )


def test_old_checkpoints_go_and_the_best_stays(tmp_path: Path) -> None:
    config = make_config(
        epochs=6, checkpoint=CheckpointConfig(every_epochs=1, keep_last=2, keep_best=1)
    )
    train_here(config, Classify, tmp_path)
    steps = catalog.list_steps(tmp_path / "checkpoints")
    assert steps[-2:] == [25, 30]
    assert len(steps) in (2, 3)


def test_a_run_without_group_and_one_with_a_group_of_one_are_the_same(tmp_path: Path) -> None:
    config = make_config()
    train_here(config, Classify, tmp_path / "alone")
    train_on(1, config, Classify, tmp_path / "group")
    alone = newest(tmp_path / "alone")
    group = newest(tmp_path / "group")
    alone.documents["progress"], group.documents["progress"] = {}, {}
    alone.tensors.pop("rng"), group.tensors.pop("rng")
    assert_same_bits(alone, group)

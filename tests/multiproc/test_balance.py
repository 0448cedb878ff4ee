"""`--data.balance auto`: ranks of different speeds get samples by their speed, and it is still the
same run."""

from __future__ import annotations

import json
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from drumline.base.errors import UsageError
from drumline.config.schema import CheckpointConfig, Config
from drumline.report.verify.run_check import verify_run
from drumline.runs import catalog
from drumline.runs.events import read_events
from drumline.runs.ledger_entries import from_json
from drumline.training.tasks.base import Loss
from tests.jobs import (
    Classify,
    WeighTokens,
    assert_same_bits,
    make_config,
    newest,
    train_each_here,
    train_here,
    train_on,
)
from tests.multiproc.test_resume import interrupted_at
from tests.ranks import run_ranks
from tests.stream_jobs import ClassifyStream

SECONDS_PER_SAMPLE = 0.004


class SlowRank:
    """The last rank is at a third of the others' speed."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        is_slow = dist.is_initialized() and dist.get_rank() == dist.get_world_size() - 1
        time.sleep(len(batch[0]) * SECONDS_PER_SAMPLE * (3 if is_slow else 1))
        return super().loss(model, batch)  # type: ignore[misc, no-any-return]


class OneSlow(SlowRank, Classify):
    pass


class OneSlowWithTokens(SlowRank, WeighTokens):
    """Each sample has its own weight."""


def config_of(balance: str = "auto", **settings: Any) -> Config:
    saves = CheckpointConfig(every_steps=6, every_epochs=0, keep_last=50, keep_best=0)
    config = make_config(samples=250, checkpoint=saves, eval_every_epochs=0, **settings)
    return replace(config, data=replace(config.data, balance=balance))


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [
        event for event in read_events(run / "events" / "rank-00000.jsonl") if event["kind"] == kind
    ]


def recorded(run: Path) -> dict[str, Any]:
    balance: dict[str, Any] = newest(run).documents["progress"]["facts"]["balance"]
    return balance


def last_sizes(run: Path) -> list[int]:
    """Of the last full batch in the ledger, by rank."""
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    ranks = [from_json(rank) for rank in lines[-1]["ranks"]]
    stride = max(entry.stride for entry in ranks[0])
    return [
        next(one.high - one.low for one in reversed(rank) if one.stride == stride) for rank in ranks
    ]


def assert_once(run: Path) -> None:
    report = verify_run(run, lambda *_: None)
    assert report.problems == []
    assert "each exactly once" in next(
        section.summary for section in report.sections if section.name == "samples"
    )


def train_and_refuse(folder: Path, even: Config, balanced: Config) -> str:
    few = [
        replace(config, train=replace(config.train, steps=20, batch_size=8, accumulate=1))
        for config in (even, balanced)
    ]
    jobs = [(even, Classify, "even"), (balanced, OneSlow, "balanced")]
    jobs += [(few[0], WeighTokens, "tokens even"), (few[1], OneSlowWithTokens, "tokens")]
    train_each_here([(config, task, folder / run) for config, task, run in jobs])
    with pytest.raises(UsageError) as caught:
        train_here(config_of(steps=2), ClassifyStream, folder / "stream")
    return str(caught.value)


@pytest.mark.soak
def test_a_slow_rank_gets_fewer_samples_and_the_run_is_the_same(tmp_path: Path) -> None:
    # The sizes cannot change between the steps 28 and 40.
    even, balanced = (
        config_of(balance, batch_size=24, steps=39, accumulate=2) for balance in ("off", "auto")
    )
    run = tmp_path / "balanced"
    refusals = run_ranks(2, train_and_refuse, tmp_path, even, balanced)
    assert refusals[0] == (
        "--data.balance auto needs samples by index, and Plain is a stream\n"
        "  try: leave it out, or give a dataset with __len__ and __getitem__"
    )
    changes = [event for event in events(run, "note") if "shard_sizes" in event]
    assert changes[0]["step"] == 16
    assert 15 <= changes[-1]["shard_sizes"][0] <= 21, changes
    assert last_sizes(run) == changes[-1]["shard_sizes"] == recorded(run)["sizes"]
    assert_once(run)
    (large, small), host = changes[0]["shard_sizes"], changes[0]["host"]
    assert re.fullmatch(
        rf"ranks get samples by their speed from step 17 on \(rank 0 \({host}\): {large}; rank 1 \({host}\): "
        rf"{small}\): steps should be \d+% faster; "
        "--train.micro_batch_size limits how many a rank holds at once",
        changes[0]["message"],
    )

    assert recorded(tmp_path / "tokens")["sizes"] != [4, 4]
    for even_run, other in (("even", "balanced"), ("tokens even", "tokens")):
        expected, weights = (newest(tmp_path / name).tensors["model"] for name in (even_run, other))
        assert all(
            torch.allclose(weights[name], expected[name], rtol=1e-9, atol=1e-12)
            for name in expected
        )
    assert "balance" not in newest(tmp_path / "even").documents["progress"]["facts"]

    # What a kill after step 30 leaves, killed once more after step 36.
    killed = Path(shutil.copytree(run, tmp_path / "killed"))
    for step in (step for step in catalog.list_steps(killed / "checkpoints") if step > 30):
        shutil.rmtree(killed / "checkpoints" / catalog.folder_name(step))
    interrupted_at(36, 2, balanced, OneSlow, killed)
    train_on(2, balanced, OneSlow, killed)
    assert [event["step"] for event in events(killed, "resume")] == [30, 36]
    ends = [newest(killed), newest(run)]
    for end in ends:
        # a start does not measure its first steps
        del end.documents["progress"]["facts"]["balance"]["measure_at"]
    assert_same_bits(*ends)
    assert_once(killed)


@pytest.mark.soak
def test_four_ranks_and_then_two(tmp_path: Path) -> None:
    """With workers that have made batches ahead, and never more samples at once than asked for."""
    config = config_of(batch_size=40, steps=34, micro_batch_size=5, workers=1)
    train_on(4, config, OneSlow, tmp_path)
    *fast, slow = recorded(tmp_path)["sizes"]
    assert 2 <= slow <= 7
    assert all(9 <= size <= 14 for size in fast)
    assert last_sizes(tmp_path) == [*fast, slow]
    assert_once(tmp_path)
    train_on(2, replace(config, train=replace(config.train, steps=36)), OneSlow, tmp_path)
    assert recorded(tmp_path)["sizes"] == [20, 20]
    assert recorded(tmp_path)["measure_at"] == 34 + 5
    assert_once(tmp_path)

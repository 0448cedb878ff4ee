"""`--dist.sync`: replicas train alone, synchronize in rounds as one would write it down, and resume
bit for bit."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from drumline.base.errors import TrainingError, UsageError
from drumline.checkpoint import store
from drumline.config.schema import CheckpointConfig, Config, DistConfig, OptimConfig
from drumline.parallel import outer_sync
from drumline.parallel.outer_sync import OuterSync
from drumline.parallel.replica_groups import DeltaSum
from drumline.runs import catalog
from drumline.runs.events import read_events
from drumline.training.manager import RunManager
from drumline.training.tasks.base import Task
from drumline.training.tasks.hook import Hook
from drumline.training.tasks.ready_hooks import EMA
from tests.jobs import (
    NO_SIDECAR,
    Classify,
    Everything,
    WeighTokens,
    assert_same_bits,
    make_config,
    newest,
    train_each_here,
    train_each_on,
    train_here,
)
from tests.multiproc.test_resume import die_after
from tests.ranks import RanksFailed, run_ranks

EVERY_STEP = CheckpointConfig(every_steps=1, every_epochs=0, keep_last=50, keep_best=0)
SGD = OptimConfig(
    lr=0.1, momentum=0.9, nesterov=False, schedule="constant", weight_decay=0.0, clip_norm=0.5
)
ADAM = OptimConfig(name="adamw", lr=0.01, schedule="cosine", warmup_steps=3, clip_norm=1.0)
STEPS = 11
STREAMED = DistConfig(sync="diloco:6", sync_parts=2, sync_overlap=2)


class Seeded(Classify):
    """With the same first weights in any loop."""

    def model(self) -> nn.Module:
        torch.manual_seed(3)
        return super().model()


class Averaged(Everything):
    """BatchNorm, dropout, and an average of the weights."""

    def hooks(self) -> Sequence[Hook]:
        return [EMA(0.75)]


def config_of(
    dist: DistConfig, *, optim: OptimConfig = SGD, steps: int = STEPS, **settings: Any
) -> Config:
    return replace(make_config(optim=optim, steps=steps, **settings), dist=dist)


def saved(run: Path, step: int) -> store.Snapshot:
    return store.read(run / "checkpoints" / catalog.folder_name(step))


# The same as a loop that one would write down


def by_hand(config: Config, every: int, parts: list[list[int]], overlap: int) -> list[Tensor]:
    """The weights that all ranks share at the end; torch's own SGD is the outer optimizer."""
    with RunManager(watch=NO_SIDECAR) as ddp:
        task = Seeded(config)
        loader = ddp.loader(task.train_data(), batch_size=config.train.batch_size)
        model = task.model()
        parameters = list(model.parameters())
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        shared = [parameter.detach().clone() for parameter in parameters]
        is_local = config.dist.sync.startswith("local")
        settings = config.dist
        outer = torch.optim.SGD(
            shared, lr=settings.outer_lr, momentum=settings.outer_momentum, nesterov=True
        )
        if is_local:
            outer = torch.optim.SGD(shared, lr=1.0)
        sent: dict[int, tuple[int, list[Tensor], list[Tensor]]] = {}

        def begin(number: int, step: int) -> None:
            begun = [parameters[index].detach().clone() for index in parts[number]]
            means = [
                (shared[index] - part) / ddp.world_size
                for index, part in zip(parts[number], begun, strict=True)
            ]
            for mean in means:
                dist.all_reduce(mean)
            sent[number] = (step, begun, means)

        def end(number: int) -> None:
            _, begun, means = sent.pop(number)
            for index, mean in zip(parts[number], means, strict=True):
                shared[index].grad = mean
            outer.step()
            outer.zero_grad()
            with torch.no_grad():
                for index, part in zip(parts[number], begun, strict=True):
                    parameters[index].add_(shared[index] - part)

        step = 0
        while step < STEPS:
            for inputs, targets in loader:
                step += 1
                functional.cross_entropy(model(inputs), targets).backward()
                nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()
                optimizer.zero_grad()
                for number in range(len(parts)):
                    if number in sent and (step == STEPS or step == sent[number][0] + overlap):
                        end(number)
                for number in range(len(parts)):
                    if step == STEPS or step % every == (number + 1) * every // len(parts) % every:
                        begin(number, step)
                        if step == STEPS or not overlap:
                            end(number)
                if step == STEPS:
                    break
        return shared


def test_rounds_are_those_of_a_loop_by_hand(tmp_path: Path) -> None:
    whole = [[0, 1, 2, 3]]
    jobs = {
        "local": (DistConfig(sync="local:3"), 3, whole, 0),
        "diloco": (DistConfig(sync="diloco:4"), 4, whole, 0),
        "parts": (STREAMED, 6, [[0], [1, 2, 3]], 2),
    }
    train_each_on(2, *((config_of(job[0]), Seeded, tmp_path / name) for name, job in jobs.items()))
    results = run_ranks(2, each_by_hand, [(config_of(job[0]), *job[1:]) for job in jobs.values()])
    for name, first, second in zip(jobs, *results, strict=True):
        weights = newest(tmp_path / name).tensors["model"]
        for key, left, right in zip(
            ("0.weight", "0.bias", "3.weight", "3.bias"), first, second, strict=True
        ):
            trained = weights[key]
            torch.testing.assert_close(
                trained, torch.tensor(left, dtype=torch.float64), rtol=0, atol=1e-12
            )
            assert left == right


def each_by_hand(jobs: list[tuple[Any, ...]]) -> list[list[Any]]:
    return [[weight.tolist() for weight in by_hand(*job)] for job in jobs]


def on_nodes(function: Any, *args: Any) -> Any:
    """As a rank of a node with two."""
    os.environ |= {"LOCAL_RANK": str(int(os.environ["RANK"]) % 2), "LOCAL_WORLD_SIZE": "2"}
    return function(*args)


@pytest.mark.soak
def test_a_node_trains_as_one_rank_with_its_samples(tmp_path: Path) -> None:
    """Micro-batches, an uneven last batch, and a loss with weights."""
    settings = {"samples": 37, "accumulate": 2}
    dist = DistConfig(sync="diloco:3")
    in_nodes = replace(dist, sync_within="node")
    jobs = [
        (config, task, tmp_path / f"{config.dist.sync_within}-{task.__name__}")
        for config in (config_of(dist, **settings), config_of(in_nodes, **settings))
        for task in (Seeded, WeighTokens)
    ]
    train_each_on(2, *jobs[:2])
    run_ranks(4, on_nodes, train_each_here, jobs[2:])
    for (_, _, one), (_, _, other) in zip(jobs[:2], jobs[2:], strict=True):
        for trained, same in zip(
            *(newest(run).tensors["model"].values() for run in (one, other)), strict=True
        ):
            torch.testing.assert_close(trained, same, rtol=0, atol=1e-9)
        documents = [newest(run).documents["replicas"]["ranks"] for run in (one, other)]
        assert [bool(document["dict"]) for document in documents[1]] == [True, False, True, False]
    start = next(event for event in ledger(tmp_path / "node-Seeded") if event["kind"] == "start")
    assert start["world_size"] == 4


def ledger(run: Path) -> list[dict[str, Any]]:
    return list(read_events(run / "ledger.jsonl"))


# Checkpoints


RESUMED = {
    "streamed": (2, 7, replace(STREAMED, outer_dtype="int8")),
    "nodes": (4, 8, DistConfig(sync="diloco:3", sync_within="node", outer_dtype="bf16")),
}


@pytest.mark.parametrize("name", ["streamed", pytest.param("nodes", marks=pytest.mark.soak)])
def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path, name: str) -> None:
    """Between two rounds; in the first case while a part is on its way."""
    world_size, step, settings = RESUMED[name]
    size = {"batch_size": 16, "samples": 64, "dropout": 0.3, "accumulate": 2, "augment": True}
    config = config_of(settings, optim=ADAM, checkpoint=EVERY_STEP, **size)
    as_rank = (on_nodes,) if name == "nodes" else ()
    with pytest.raises(RanksFailed):
        run_ranks(world_size, *as_rank, die_after, step, config, Averaged, tmp_path / "killed")
    assert catalog.list_steps(tmp_path / "killed" / "checkpoints")[-1] == step
    seldom = config_of(settings, optim=ADAM, **size, eval_every_epochs=0)
    jobs = [(config, Averaged, tmp_path / "killed"), (config, Averaged, tmp_path / "whole")]
    run_ranks(
        world_size, *as_rank, train_each_here, [*jobs, (seldom, Averaged, tmp_path / "seldom")]
    )
    whole = newest(tmp_path / "whole")
    assert_same_bits(newest(tmp_path / "killed"), whole)
    for tensor, other in zip(
        whole.tensors["model"].values(),
        newest(tmp_path / "seldom").tensors["model"].values(),
        strict=True,
    ):
        assert torch.equal(tensor, other), "saves and evaluations between rounds change nothing"
    assert_shared_weights(tmp_path / "whole", settings)


def assert_shared_weights(run: Path, settings: DistConfig) -> None:
    """A checkpoint has the weights of the last round, which the average follows; ranks have weights
    of their own."""
    if settings.sync_parts == 1:
        third = saved(run, 3).tensors
        fifth = saved(run, 5).tensors
        assert all(
            torch.equal(third["model"][name], tensor) for name, tensor in fifth["model"].items()
        )
        own = [
            tensor
            for name, tensor in fifth["replicas"].items()
            if name.endswith("weights/0.weight")
        ]
        assert len(own) == 2
        assert not torch.equal(*own)
        assert not [name for name in third["replicas"] if "/weights/" in name]
    average = saved(run, 1).tensors["hooks"]
    for step in range(2, STEPS + 1):
        tensors = saved(run, step).tensors
        for name, tensor in tensors["model"].items():
            key = next(key for key in average if key.endswith(f"/{name}"))
            if tensor.is_floating_point():
                expected = 0.75 * average[key] + 0.25 * tensor
                torch.testing.assert_close(tensors["hooks"][key], expected, rtol=1e-5, atol=1e-6)
        average = tensors["hooks"]


def test_evaluations_are_of_the_shared_weights(tmp_path: Path) -> None:
    config = config_of(DistConfig(sync="local:3"), eval_every_steps=1, steps=6)
    train_each_on(2, (config, Seeded, tmp_path))
    events = read_events(tmp_path / "events" / "rank-00000.jsonl")
    losses = [event["loss"] for event in events if event["kind"] == "evaluation"]
    assert losses[2] == losses[3] == losses[4]
    assert len(set(losses)) == 3
    assert losses[0] == losses[1], "of the first weights"


def resumed_messages(run: Path, config: Config) -> list[str]:
    results: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: results.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("drumline").addHandler(handler)
    train_here(config, Seeded, run)
    return results


@pytest.mark.soak
def test_another_number_of_replicas_continues(tmp_path: Path) -> None:
    dist = DistConfig(sync="diloco:4", outer_dtype="int8")
    train_each_on(2, (config_of(DistConfig(), steps=2), Seeded, tmp_path))
    train_each_on(2, (config_of(dist, steps=6), Seeded, tmp_path))
    messages, others, _ = run_ranks(3, resumed_messages, tmp_path, config_of(dist, steps=9))
    assert others == []
    assert messages == [
        "the replicas, or dist.sync_parts, dist.sync_overlap or dist.outer_dtype, changed since the checkpoint: what "
        "was being sent, and what rounding has left out, is lost",
        "the checkpoint has 2 replicas, and this run 3: they continue from those in turn",
    ]
    momentum = newest(tmp_path).tensors["outer"]["momentum/0.weight"]
    assert momentum.abs().sum() > 0
    train_each_on(2, (config_of(DistConfig(), steps=11), Seeded, tmp_path))
    assert newest(tmp_path).documents.keys().isdisjoint({"replicas", "outer"})


# What replicas share stays the same on all ranks


class DamagedSync(OuterSync):
    """A bit of what rank 1 shares flips after step 4."""

    def after_step(self, step: int, *, is_last: bool) -> None:
        super().after_step(step, is_last=is_last)
        if step == 4 and dist.get_rank() == 1:
            self._parts[0].shared.view(torch.uint8)[5] ^= 1


def damaged(run: Path) -> str:
    outer_sync.OuterSync = DamagedSync  # type: ignore[misc]
    config = config_of(DistConfig(sync="local:3"), checkpoint=CheckpointConfig(every_epochs=0))
    with pytest.raises(TrainingError) as caught:
        train_here(replace(config, watch=replace(NO_SIDECAR, replicas_every=1)), Seeded, run)
    return str(caught.value)


def test_a_difference_is_found_in_the_next_round(tmp_path: Path) -> None:
    first, second = run_ranks(2, damaged, tmp_path)
    assert first == second
    assert "rank 1" in first
    assert "shared/0.weight" in first
    assert "step 6" in first


# What is sent


def summed(wire: str) -> tuple[float, list[float]]:
    """How far the sum of many small vectors is off, relative to it; and the last sum."""
    with RunManager(watch=NO_SIDECAR):
        values = torch.full((700,), 1e-3)
        values[::100] = 1.0  # so coarse a scale that the others are rounded to 0
        group = dist.group.WORLD
        assert group is not None
        delta_sum = DeltaSum(values, wire, group)
        total = torch.zeros(700)
        for _ in range(40):
            delta_sum.start(values * (dist.get_rank() + 1))
            delta_sum.advance()
            last = delta_sum.take()
            total += last
        expected = 40 * values * sum(range(1, dist.get_world_size() + 1))
        return float(((total - expected) / expected).abs().max()), last.tolist()


def test_what_rounding_leaves_out_is_sent_later() -> None:
    results = run_ranks(3, each_summed)
    for position, most in enumerate((1e-5, 1e-3, 0.4)):
        errors, sums = zip(*(result[position] for result in results), strict=True)
        assert max(errors) < most
        assert all(total == sums[0] for total in sums)


def each_summed() -> list[tuple[float, list[float]]]:
    return [summed(wire) for wire in ("fp32", "bf16", "int8")]


@pytest.mark.soak
def test_what_is_rounded_trains_nearly_the_same(tmp_path: Path) -> None:
    settings = DistConfig(sync="diloco:4")
    jobs = {wire: replace(settings, outer_dtype=wire) for wire in ("fp32", "bf16", "int8")}
    train_each_on(
        2, *((config_of(job, steps=24), Seeded, tmp_path / name) for name, job in jobs.items())
    )
    weights = {name: newest(tmp_path / name).tensors["model"] for name in jobs}
    begin = Seeded(config_of(settings)).model().state_dict()

    def distance(name: str) -> float:
        exact = weights["fp32"]
        apart = sum(float((weights[name][key] - exact[key]).square().sum()) for key in exact)
        return (
            apart / sum(float((begin[key] - exact[key]).square().sum()) for key in exact)
        ) ** 0.5

    assert 0 < distance("bf16") < 0.01
    assert 0 < distance("int8") < 0.03


# What is refused


class Synchronized(Seeded):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.SyncBatchNorm(8), nn.Linear(8, 2)).double()


def refusals(run: Path) -> list[str]:
    results = []
    dist = DistConfig(sync="local:8", sync_parts=5)
    jobs: list[tuple[DistConfig, type[Task]]] = [
        (dist, Seeded),
        (replace(dist, sync_parts=1), Synchronized),
    ]
    for settings, task in jobs:
        with pytest.raises(UsageError) as caught:
            train_here(config_of(settings), task, run)
        results.append(str(caught.value))
    return results


def test_what_cannot_train_alone_is_refused(tmp_path: Path) -> None:
    assert run_ranks(2, refusals, tmp_path)[0] == [
        "dist.sync_parts is 5, but the model has 4 trained parameters\n  try: set it to 4 or less",
        "the model's 1 is a SyncBatchNorm, but with --dist.sync local:8 replicas train alone\n"
        "  try: use nn.BatchNorm in its place; --dist.sync_batchnorm with --dist.sync_within node synchronizes it "
        "inside nodes",
    ]

"""`--dist.mode zero1|fsdp|hsdp`: trains as ddp does, resumes bit for bit after a kill, and any mode
and number of ranks resumes from the checkpoints of any other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.base.errors import UsageError
from drumline.checkpoint import store
from drumline.checkpoint.optimizer_state import decode_state
from drumline.config.schema import CheckpointConfig, Config, DistConfig, OptimConfig
from drumline.parallel.replicas import replica_tensors
from drumline.parallel.shards import own_part
from drumline.runs.events import read_events
from drumline.training.loop import Loop
from drumline.training.tasks.base import Loss, Task
from drumline.training.tasks.built_in import GPT
from drumline.training.tasks.hook import Hook
from tests.hooked_jobs import ByHand
from tests.jobs import (
    Classify,
    WeighTokens,
    assert_same_bits,
    make_config,
    newest,
    train_each_on,
    train_here,
    train_on,
)
from tests.multiproc.test_resume import interrupted_at
from tests.ranks import RanksFailed, run_ranks

MODES = ("ddp", "zero1", "fsdp", "hsdp")
WRAP = {"fsdp": ("Residual",), "hsdp": ("60",)}
EVERY_STEP = CheckpointConfig(every_steps=1, every_epochs=0, keep_last=50, keep_best=0)
ADAM = OptimConfig(name="adamw", lr=0.01, schedule="constant", clip_norm=0.1)


class Residual(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)
        self.norm = nn.BatchNorm1d(7)
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.dropout(torch.tanh(self.linear(self.norm(inputs))))


class Awkward(nn.Module):
    """What is hard to shard: 7 rows for 2 or 4 ranks, 2 rows for 4 ranks, several groups, a frozen
    parameter, a weight with two names, one with a single row."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.blocks = nn.ModuleList(Residual(dropout) for _ in range(3))
        self.tied = nn.Linear(7, 7, bias=False)
        self.again = nn.Linear(7, 7)
        self.again.weight = self.tied.weight
        self.frozen = nn.Parameter(torch.randn(5, 7), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.out = nn.Linear(7, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        hidden = self.again(torch.tanh(self.tied(hidden))) * self.scale + self.frozen.mean(0)
        return self.out(hidden)


class Shardable(Classify):
    def model(self) -> nn.Module:
        return Awkward(self.config.model.dropout).double()


class Averaged(Shardable):
    """With hooks that keep an average in shards."""

    def hooks(self) -> Sequence[Hook]:
        from tests.hooked_jobs import DECAY, EMA, EarlyStopping, LogSamples, Points

        samples = LogSamples(Points(3).inputs, show=str)
        return [samples, EMA(DECAY), ByHand(), EarlyStopping("loss", patience=99)]

    def predict(self, model: nn.Module, batch: Tensor) -> Any:
        return model(batch).tolist()


def in_mode(mode: str, config: Config, **dist: Any) -> Config:
    shard_ranks = 2 if mode == "hsdp" else None
    return replace(config, dist=DistConfig(mode=mode, shard_ranks=shard_ranks, **dist))  # type: ignore[arg-type]


def config_of(**settings: Any) -> Config:
    return make_config(**{"optim": ADAM, "checkpoint": EVERY_STEP, "batch_size": 16, **settings})


def events_of(run: Path, kind: str) -> list[dict[str, Any]]:
    return [
        event for event in read_events(run / "events" / "rank-00000.jsonl") if event["kind"] == kind
    ]


def assert_close(left: store.Snapshot, right: store.Snapshot, **tolerance: float) -> None:
    """The same weights and optimizer state, up to the order of sums."""
    for file in ("model", "optimizer"):
        assert left.tensors[file].keys() == right.tensors[file].keys()
        for name, tensor in left.tensors[file].items():
            torch.testing.assert_close(
                tensor,
                right.tensors[file][name],
                msg=lambda text, name=name: f"{name}: {text}",
                **tolerance,
            )
    assert left.documents["model"] == right.documents["model"]


def ledger_of(run: Path) -> list[Any]:
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    return [line["ranks"] for line in lines if line["kind"] == "steps"]


@pytest.mark.soak
def test_fsdp_and_hsdp_train_as_ddp_does_on_four_ranks(tmp_path: Path) -> None:
    assert_trains_as_ddp(4, ("fsdp", "hsdp"), tmp_path, epochs=1)


def assert_trains_as_ddp(
    world_size: int, modes: Sequence[str], folder: Path, **settings: Any
) -> None:
    """With accumulation, clipping, an uneven last batch and evaluations of 6 batches, on the same
    samples. Blocks are found by default, by their class, and by their size (a block has 70
    parameters)."""
    config = config_of(accumulate=2, checkpoint=CheckpointConfig(), **settings)
    jobs = {mode: in_mode(mode, config, wrap=WRAP.get(mode)) for mode in ("ddp", *modes)}
    train_each_on(world_size, *((job, NoBuffers, folder / mode) for mode, job in jobs.items()))
    expected = newest(folder / "ddp")
    assert expected.documents["model"] == {"aliases": {"again.weight": "tied.weight"}}
    for mode in modes:
        run = folder / mode
        assert_close(newest(run), expected, rtol=1e-9, atol=1e-10)
        assert ledger_of(run) == ledger_of(folder / "ddp")
        for kind, name in (
            ("train", "loss"),
            ("train", "grad_norm"),
            ("evaluation", "loss"),
            ("evaluation", "accuracy"),
        ):
            ours, theirs = (
                [event[name] for event in events_of(each_run, kind)]
                for each_run in (run, folder / "ddp")
            )
            assert theirs
            assert ours == pytest.approx(theirs, rel=1e-9), f"{kind} {name} of {mode}"
        ours, theirs = (flops_per_sample(each_run) for each_run in (run, folder / "ddp"))
        assert ours == pytest.approx(theirs, rel=1e-6), "of the whole model, and not of a shard"
        (last,) = {event["path"] for event in events_of(run, "checkpoint")[-1:]}
        written = {path.name for path in Path(last).glob("*-part-*")}
        assert len({name.rpartition("-")[2] for name in written}) == (
            2 if mode == "hsdp" else world_size
        )


def flops_per_sample(run: Path) -> list[float]:
    flops = [
        event["tflop_per_s"] / event["samples_per_s"] * 1e12 for event in events_of(run, "train")
    ]
    assert flops
    assert min(flops) > 0
    return flops


class Branching(Awkward):
    """One layer, which is in no block, is used by some ranks only."""

    def __init__(self, users: Sequence[int]) -> None:
        super().__init__()
        self.users = users
        self.extra = nn.Linear(6, 6)
        for block in self.blocks:
            block.norm = nn.LayerNorm(7)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(
            self.extra(inputs) if torch.distributed.get_rank() in self.users else inputs
        )


class UsedByNone(Shardable):
    users: ClassVar[tuple[int, ...]] = ()

    def model(self) -> nn.Module:
        return Branching(self.users).double()


class UsedByOne(UsedByNone):
    users = (1,)


def unused_in_modes(config: Config, folder: Path) -> str:
    """Returns the error of the job whose ranks use different parameters."""
    for mode in MODES[:3]:
        train_here(
            in_mode(mode, config, find_unused_parameters=True), UsedByOne, folder / f"one-{mode}"
        )
    train_here(in_mode("fsdp", config), UsedByNone, folder / "none")
    with pytest.raises(UsageError) as caught:
        train_here(in_mode("fsdp", config), UsedByOne, folder / "refused")
    assert caught.value.next_step is not None
    assert "or set --dist.find_unused_parameters" in caught.value.next_step
    return caught.value.what


@pytest.mark.soak
def test_parameters_that_not_all_ranks_use_are_named_before_the_first_step(tmp_path: Path) -> None:
    """As in ddp they need `find_unused_parameters`; those that no rank uses need nothing."""
    optim = replace(ADAM, weight_decay=0.0)
    for what in run_ranks(2, unused_in_modes, config_of(steps=3, optim=optim), tmp_path):
        assert what.startswith("the parameters that the loss does not use differ across ranks: "), (
            what
        )
        assert "extra.bias and extra.weight" in what
    assert not list((tmp_path / "refused" / "checkpoints").glob("*"))
    for mode in MODES[1:3]:
        assert_close(
            newest(tmp_path / f"one-{mode}"), newest(tmp_path / "one-ddp"), rtol=1e-9, atol=1e-10
        )
    notes = [event["message"] for event in events_of(tmp_path / "none", "note")]
    expected = (
        "the loss does not use these parameters, which are not trained: extra.weight and extra.bias"
    )
    assert notes.count(expected) == 1, notes


def assert_resumes(world_size: int, mode: str, folder: Path) -> None:
    """With BatchNorm, dropout, augmentation, accumulation and an average of the weights."""
    config = in_mode(
        mode,
        config_of(accumulate=2, dropout=0.3, augment=True, epochs=2, batch_size=18, samples=36),
    )
    interrupted_at(2, world_size, config, Averaged, folder / "killed")
    run_ranks(world_size, whole_and_killed, config, Averaged, folder)
    killed = newest(folder / "killed")
    whole = newest(folder / "whole")
    assert_same_bits(killed, whole)
    assert [event["step"] for event in events_of(folder / "killed", "resume")] == [2]
    averages = decode_state(
        killed.documents["hooks"][1]["state"], killed.tensors["hooks"].__getitem__
    )["average"]
    by_hand = decode_state(
        killed.documents["hooks"][2]["state"], killed.tensors["hooks"].__getitem__
    )["average"]
    assert averages.keys() == killed.tensors["model"].keys()
    for name, average in averages.items():
        assert torch.allclose(average, by_hand[name], rtol=1e-12, atol=1e-14), name


def whole_and_killed(config: Config, task: type[Task], folder: Path) -> None:
    train_here(config, task, folder / "whole")
    train_here(config, task, folder / "killed")


@pytest.mark.soak
def test_any_mode_and_world_resumes_from_any_other(tmp_path: Path) -> None:
    assert_legs_train_on(
        [("ddp", 2), ("fsdp", 3), ("zero1", 2), ("hsdp", 4), ("fsdp", 1)], tmp_path
    )


def assert_legs_train_on(legs: Sequence[tuple[str, int]], folder: Path) -> None:
    """Each leg takes two steps from where the last one stopped. A leg that lost a shard, or an
    optimizer's state, would be far away from the run that was never stopped: clipped steps of AdamW
    are long."""
    config = config_of(steps=2 * len(legs))
    for number, (mode, world_size) in enumerate(legs, 1):
        leg = replace(config, train=replace(config.train, steps=2 * number))
        train_on(world_size, in_mode(mode, leg), NoBuffers, folder / "legs")
    train_on(1, config, NoBuffers, folder / "whole")
    legs_end = newest(folder / "legs")
    whole = newest(folder / "whole")
    assert_close(legs_end, whole, rtol=1e-7, atol=1e-9)
    assert len(events_of(folder / "legs", "resume")) == len(legs) - 1


class NoBuffers(Shardable):
    """Whose result does not depend on how the batch is split."""

    def model(self) -> nn.Module:
        model = Awkward()
        for block in model.blocks:
            block.norm = nn.LayerNorm(7)
        return model.double()


class Gpt(WeighTokens):
    """A loss with weights; its embedding is the output layer, too."""

    def model(self) -> nn.Module:
        return GPT(vocab_size=11, context=7, layers=3, heads=1, width=9)


@pytest.mark.soak
def test_a_gpt_trains_as_with_ddp_in_each_precision(tmp_path: Path) -> None:
    assert_gpt_trains(tmp_path, fp32=("fsdp",), bf16=("zero1",), policy="every:2")


def assert_gpt_trains(
    folder: Path, *, fp32: Sequence[str], bf16: Sequence[str], policy: bool | str
) -> None:
    """In fp32 built without memory, with activations computed again; in bf16 also gathered and
    reduced in it."""
    saves = CheckpointConfig()
    settings = {
        "epochs": 2,
        "batch_size": 8,
        "optim": replace(ADAM, clip_norm=1.0),
        "checkpoint": saves,
    }
    whole = config_of(**settings)
    rounded = config_of(**settings, precision="bf16")
    whole = replace(whole, model=replace(whole.model, activation_checkpointing=policy))
    jobs = {f"{mode}-fp32": in_mode(mode, whole, meta_init=True) for mode in ("ddp", *fp32)}
    jobs["ddp-bf16"] = in_mode("ddp", rounded)
    jobs |= {f"{mode}-bf16": in_mode(mode, rounded, shard_dtype="bf16") for mode in bf16}
    train_each_on(2, *((job, Gpt, folder / name) for name, job in jobs.items()))
    num_recomputed = 2 if policy == "every:2" else 3
    for name in jobs:
        expected, found = (
            [event["loss"] for event in events_of(folder / run, "train")]
            for run in (f"ddp-{name[-4:]}", name)
        )
        assert found == pytest.approx(expected, rel=1e-5 if name.endswith("fp32") else 0.02), name
        notes = [event["message"] for event in events_of(folder / name, "note")]
        assert (f"recompute: {num_recomputed} x Block" in notes) == name.endswith("fp32"), notes
        assert ("shards: 3 x Block" in notes) == (not name.startswith("ddp")), notes
    for mode in bf16:
        assert (
            newest(folder / f"{mode}-bf16").tensors["model"]["blocks.0.mlp_in.weight"].dtype
            is torch.float32
        )


def compiled_and_not(config: Config, modes: Sequence[str], folder: Path) -> list[int]:
    """Train in each mode; how often torch has compiled something. Not by inductor, which takes
    longer."""
    counts = []
    for mode in modes:
        eager = in_mode(mode, config, meta_init=True)
        train_here(eager, Gpt, folder / mode / "eager")
        usual, torch.compile = torch.compile, partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
        train_here(
            replace(eager, train=replace(eager.train, step="compile")),
            Gpt,
            folder / mode / "compile",
        )
        torch.compile = usual
        from torch._dynamo.utils import counters

        assert not counters["graph_break"], counters
        counts.append(counters["stats"]["unique_graphs"])
        torch._dynamo.reset()
    return counts


def assert_compiles(folder: Path, modes: Sequence[str], policy: bool | str) -> None:
    config = config_of(
        epochs=2, batch_size=8, optim=replace(ADAM, clip_norm=1.0), checkpoint=CheckpointConfig()
    )
    config = replace(config, model=replace(config.model, activation_checkpointing=policy))
    for counts in run_ranks(2, compiled_and_not, config, modes, folder):
        assert counts[0] in (1, 2, 3), (
            "the three blocks share their graphs; a short batch needs one of its own"
        )
    for mode in modes:
        eager, compiled = (newest(folder / mode / step) for step in ("eager", "compile"))
        for each_run in (eager, compiled):
            each_run.documents["progress"].pop("facts")
        assert_close(compiled, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.soak
def test_blocks_are_compiled_before_they_are_sharded(tmp_path: Path) -> None:
    assert_compiles(tmp_path, ("fsdp",), policy=False)


class NotFinite(NoBuffers):
    """The loss of one rank is infinite in its third batch."""

    calls = 0

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        loss = super().loss(model, batch)
        self.calls += self.training
        is_bad = self.calls == 3 and torch.distributed.get_rank() == 1
        return Loss(loss.total * (float("inf") if is_bad else 1.0), metrics=loss.metrics)


def test_an_update_that_is_not_finite_is_skipped_on_every_rank(tmp_path: Path) -> None:
    config = config_of(steps=5, on_nan="skip", optim=replace(ADAM, clip_norm=None))
    train_each_on(
        2, *((in_mode(mode, config), NotFinite, tmp_path / mode) for mode in ("ddp", "fsdp"))
    )
    assert_close(newest(tmp_path / "fsdp"), newest(tmp_path / "ddp"), rtol=1e-9, atol=1e-10)
    skipped = [event["message"] for event in events_of(tmp_path / "fsdp", "warning")]
    assert any("skipped: 1, the first at step 3" in message for message in skipped), skipped


def test_a_loss_that_is_not_finite_stops_every_rank(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=r"the loss is not finite .*rank 1.*step 3") as caught:
        train_on(2, in_mode("fsdp", config_of(steps=5)), NotFinite, tmp_path)
    assert len(caught.value.errors) == 2


def flip_a_bit(config: Config, run: Path) -> None:
    """Train, and change a shard of rank 3 before step 3: a bit that the rounding of a step keeps."""
    take_step = Loop.take_step

    def damaging(self: Loop, step: Any) -> None:
        if self.progress.step == 2 and self.job.ddp.rank == 3:
            weight = replica_tensors(self.job.model, self.job.optimizer, include_buffers=False)[
                "first.weight"
            ]
            own_part(weight).view(torch.int64)[0, 0] ^= 1 << 40
        take_step(self, step)

    Loop.take_step = damaging  # type: ignore[method-assign]
    train_here(config, NoBuffers, run)


def test_replicas_of_a_shard_are_compared(tmp_path: Path) -> None:
    config = in_mode("hsdp", config_of(steps=5))
    with pytest.raises(
        RanksFailed, match=r"rank 1 .* and rank 3 .* differ in first\.weight, and no majority"
    ):
        run_ranks(4, flip_a_bit, config, tmp_path)


class LooseWeights(NoBuffers):
    """Uses a parameter outside the forward pass of the model."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        return Loss(functional.linear(batch[0], model.first.weight).sum())


def refusals(config: Config, run: Path) -> list[str]:
    results = []
    for number, (task, dist) in enumerate(REFUSED):
        with pytest.raises(UsageError) as caught:
            train_here(
                replace(config, dist=DistConfig(**{"mode": "fsdp", **dist})),
                task,
                run / str(number),
            )
        results.append(caught.value.what)
    return results


REFUSED: list[tuple[type[Task], dict[str, Any]]] = [
    (LooseWeights, {}),
    (NoBuffers, {"wrap": ("Residul",)}),
    (NoBuffers, {"offload_optimizer": True}),
    (NoBuffers, {"mode": "hsdp", "shard_ranks": 3}),
]
MESSAGES = [
    "the loss uses parameters of the sharded model outside its forward pass",
    "--dist.wrap: Awkward has no module of class 'Residul': did you mean 'Residual'?",
    "--dist.offload_optimizer needs GPUs",
    "hsdp cannot split 2 ranks into groups of 3 that hold one model each",
]


def test_what_cannot_be_sharded_is_refused(tmp_path: Path) -> None:
    for results in run_ranks(2, refusals, config_of(steps=2), tmp_path):
        assert results == MESSAGES

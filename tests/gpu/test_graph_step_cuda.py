"""On a GPU: captured steps have the bits of eager ones, resume as they do, and fall back in one
sentence."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drumline.checkpoint import store
from drumline.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from drumline.data.loader import MicroBatch, Step
from drumline.data.sharding import Cursor, Sharding, plan_step
from drumline.runs import catalog
from drumline.runs.events import read_events
from drumline.training.job.job import Progress, build_job, leave_default_stream, make_manager
from drumline.training.run import TrainingRun
from drumline.training.run_context import RunRequest
from drumline.training.steps import graph
from drumline.training.steps.choice import make_step
from drumline.training.steps.graph import CapturedStep, Shape
from drumline.training.tasks import ImageClassification
from drumline.training.tasks.base import Loss
from drumline.training.tasks.built_in import Synthetic
from drumline.training.tasks.hook import Hook, Run
from drumline.training.tasks.ready_hooks import EMA
from tests.jobs import assert_same_bits, newest
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
STEPS_OF_AN_EPOCH = 15  # 1,437 digits in batches of 96: 14 full ones, and one of 93


def digits(step: str, **settings: Any) -> Config:
    return Config(
        model=ModelConfig(dropout=0.2),
        data=DataConfig(name="digits", augment=True),
        optim=OptimConfig(lr=0.05, clip_norm=1.0, schedule="cosine", warmup_steps=5),
        train=TrainConfig(
            step=step,
            **{"steps": 5 * STEPS_OF_AN_EPOCH, "batch_size": 96, "deterministic": True, **settings},
        ),
        checkpoint=CheckpointConfig(every_steps=STEPS_OF_AN_EPOCH, keep_last=10),
        log=LogConfig(every_steps=STEPS_OF_AN_EPOCH, display="none"),
    )


def train_here(
    config: Config, run: Path, task: type = ImageClassification, forget_after: int | None = None
) -> None:
    if forget_after is not None:
        for later in [
            step for step in catalog.list_steps(run / "checkpoints") if step > forget_after
        ]:
            store.remove(run / "checkpoints" / catalog.folder_name(later))
    ddp = make_manager(config)
    ddp.setup()
    try:
        TrainingRun(
            RunRequest("task", config, run, False, ("task",)), task, ddp, Progress()
        ).train()
    finally:
        ddp.cleanup()


class Averaged(ImageClassification):
    def hooks(self) -> list[Hook]:
        return [EMA(0.9)]


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [
        event for event in read_events(run / "events" / "rank-00000.jsonl") if event["kind"] == kind
    ]


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in events(run, "train")]


def messages(run: Path) -> list[str]:
    return [event["message"] for event in events(run, "warning") + events(run, "note")]


def assert_same_state(left: store.Snapshot, right: store.Snapshot) -> None:
    """Of the same training in two ways to step: a rate on the device is saved as a tensor, another
    as a number."""
    for file in left.tensors:
        names = [name for name in left.tensors[file] if not name.startswith("groups/")]
        assert names == [name for name in right.tensors[file] if not name.startswith("groups/")]
        for name in names:
            assert torch.equal(left.tensors[file][name], right.tensors[file][name]), (
                f"{file}: {name} differs"
            )
    assert left.documents.get("scaler") == right.documents.get("scaler")


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "fp32"},
        {"precision": "bf16", "accumulate": 3},
        {"precision": "fp16", "accumulate": 2},
    ],
    ids=["fp32", "bf16, accumulating", "fp16, accumulating"],
)
def test_a_captured_run_has_the_bits_of_an_eager_one(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """And so has the average of its weights, which a hook makes between the steps."""
    for step in ("eager", "graph"):
        run_ranks(1, train_here, digits(step, **settings), tmp_path / step, Averaged)

    assert "hooks" in newest(tmp_path / "graph").tensors
    assert_same_state(newest(tmp_path / "eager"), newest(tmp_path / "graph"))
    assert losses(tmp_path / "eager") == losses(tmp_path / "graph")
    rates = [
        [event["lr"] for event in events(tmp_path / step, "train")] for step in ("eager", "graph")
    ]
    # on the device a rate is a float32
    assert rates[1] == pytest.approx(rates[0], rel=1e-6)
    norms = [
        [event["grad_norm"] for event in events(tmp_path / step, "train")]
        for step in ("eager", "graph")
    ]
    assert norms[0] == norms[1]
    said = messages(tmp_path / "graph")
    assert not any("not captured" in message for message in said)


def test_adamw_without_a_group_too(tmp_path: Path) -> None:
    for step in ("eager", "graph"):
        config = replace(digits(step, precision="bf16"), optim=OptimConfig(name="adamw", lr=1e-3))
        run_ranks(1, train_alone, config, tmp_path / step)
    assert_same_state(newest(tmp_path / "eager"), newest(tmp_path / "graph"))


def train_alone(config: Config, run: Path) -> None:
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "LOCAL_WORLD_SIZE",
    ):
        os.environ.pop(name, None)
    train_here(config, run)


@pytest.mark.parametrize(
    ("step", "precision"),
    [("graph", "bf16"), ("graph", "fp16"), ("compile", "bf16"), ("compiled_graph", "bf16")],
)
def test_a_run_resumes_bit_for_bit(tmp_path: Path, step: str, precision: str) -> None:
    config = digits(step, precision=precision)
    run_ranks(1, train_here, config, tmp_path / "whole")
    run_ranks(1, train_here, config, tmp_path / "resumed")
    run_ranks(
        1, train_here, config, tmp_path / "resumed", ImageClassification, 2 * STEPS_OF_AN_EPOCH
    )
    assert_same_bits(newest(tmp_path / "whole"), newest(tmp_path / "resumed"))
    assert losses(tmp_path / "whole")[-3:] == losses(tmp_path / "resumed")[-3:]


class ManyShapes(ImageClassification):
    """Of every batch some images are left out, more of each than of the one before, until there are
    ten shapes."""

    def train_data(self) -> Any:
        return Shrinking(super().train_data())


class Shrinking:
    """A dataset whose batches come in ten sizes."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._count = 0
        self.in_channels = inner.in_channels
        self.num_classes = inner.num_classes

    def __len__(self) -> int:
        return len(self._inner)

    def batch(self, indices: Any, draws: Any) -> Any:
        images, labels = self._inner.batch(indices, draws)
        self._count += 1
        kept = len(images) - self._count % 10
        return images[:kept], labels[:kept]


def train_and_count_captures(config: Config, run: Path) -> int:
    capture = CapturedStep.__init__
    made = []

    def capture_and_count(self: CapturedStep, *args: Any) -> None:
        capture(self, *args)
        made.append(1)

    CapturedStep.__init__ = capture_and_count
    train_here(config, run, ManyShapes)
    return len(made)


def test_of_more_than_eight_shapes_the_first_eight_are_captured(tmp_path: Path) -> None:
    for step, expected in (("eager", 0), ("graph", 8)):
        config = digits(step, steps=8 * STEPS_OF_AN_EPOCH)
        assert run_ranks(1, train_and_count_captures, config, tmp_path / step) == [expected]
    said = messages(tmp_path / "graph")
    assert not any("because" in message for message in said)
    assert_same_state(newest(tmp_path / "eager"), newest(tmp_path / "graph"))


class Waits(ImageClassification):
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        loss = super().loss(model, batch)
        assert loss.total.item() > -1.0
        return loss


class Synchronises(ImageClassification):
    """Torch's debug mode does not see this; the capture fails."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        torch.cuda.synchronize()
        return super().loss(model, batch)


class DrawsOnTheHost(ImageClassification):
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        images, labels = batch
        return super().loss(model, (images * (1.0 + random.random()), labels))


class Counts(ImageClassification):
    count = 0

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        self.count += 1
        return super().loss(model, batch)


class Hooked(ImageClassification):
    def model(self) -> nn.Module:
        model = super().model()
        model.register_forward_hook(lambda *_: None)
        return model


class HooksAtStart(ImageClassification):
    def hooks(self) -> list[Hook]:
        return [Registers()]


class Registers(Hook):
    def start(self, run: Run) -> None:
        run.model.register_forward_hook(lambda *_: None)


REASONS = {
    Waits: "it waits for the device at test_graph_step_cuda.py:",
    Synchronises: "CUDA cannot capture it at test_graph_step_cuda.py:",
    DrawsOnTheHost: "it draws random numbers on the host (random), and a replayed step would repeat the same ones",
    Counts: "Counts.count changes from step to step (",
    Hooked: "MiniResNet has a hook, which a replayed step would not call",
    HooksAtStart: "MiniResNet has a hook, which a replayed step would not call",
}


@pytest.mark.parametrize("task", REASONS, ids=lambda task: task.__name__)
def test_what_cannot_be_captured_falls_back_with_a_sentence_and_the_same_bits(
    tmp_path: Path, task: type
) -> None:
    for step in ("eager", "graph"):
        run_ranks(1, train_here, digits(step, precision="fp16", steps=40), tmp_path / step, task)
    said = [message for message in messages(tmp_path / "graph") if "not captured" in message]
    because = "steps run eagerly, not captured as a CUDA graph, because "
    assert len(said) == 1
    assert said[0].startswith(because + REASONS[task])
    assert_same_state(newest(tmp_path / "eager"), newest(tmp_path / "graph"))


def test_the_usual_shape_is_watched_though_a_short_batch_comes_when_it_is_due(
    tmp_path: Path,
) -> None:
    # 10 full batches, then one of 37
    config = digits("graph", steps=14, batch_size=140)
    run_ranks(1, train_here, config, tmp_path, DrawsOnTheHost)
    assert any(REASONS[DrawsOnTheHost] in message for message in messages(tmp_path))


def gpt(step: str) -> Config:
    return Config(
        model=ModelConfig(name="gpt", layers=2, heads=4, width=128, context=128),
        data=DataConfig(name="synthetic_tokens", samples=4096),
        optim=OptimConfig(name="adamw", lr=1e-3, clip_norm=1.0),
        train=TrainConfig(step=step, steps=200, batch_size=32, precision="bf16"),
        log=LogConfig(every_steps=20, display="none"),
    )


@pytest.mark.parametrize("kind", ["images", "tokens"])
def test_all_ways_to_step_have_the_same_loss_curve(tmp_path: Path, kind: str) -> None:
    curves = {}
    for step in ("eager", "compile", "graph", "compiled_graph"):
        if kind == "tokens":
            config = gpt(step)
            task = Synthetic
        else:
            config = replace(
                digits(step, precision="bf16", deterministic=False, steps=8 * STEPS_OF_AN_EPOCH),
                model=ModelConfig(),
            )
            task = ImageClassification
        run_ranks(1, train_here, config, tmp_path / step, task)
        curves[step] = losses(tmp_path / step)
        assert not [message for message in messages(tmp_path / step) if "because" in message]
    for step in ("compile", "graph", "compiled_graph"):
        assert curves[step] == pytest.approx(curves["eager"], rel=0.05, abs=0.03), step
    assert curves["eager"][-1] < 0.7 * curves["eager"][0]


def test_auto_says_what_it_chose_and_keeps_it(tmp_path: Path) -> None:
    config = digits("auto", precision="bf16", deterministic=False, steps=10 * STEPS_OF_AN_EPOCH)
    run_ranks(1, train_here, config, tmp_path)
    [said] = [message for message in messages(tmp_path) if message.startswith("steps run as ")]
    choice = said.removeprefix("steps run as ").partition(",")[0]
    assert choice in ("eager", "compile", "graph", "compiled_graph")
    assert f"{choice} 1.00" in said
    assert newest(tmp_path).documents["progress"]["facts"]["step"] == choice
    longer = replace(config, train=replace(config.train, steps=11 * STEPS_OF_AN_EPOCH))
    run_ranks(1, train_here, longer, tmp_path)
    assert [message for message in messages(tmp_path) if message.startswith("steps run as ")] == [
        said
    ]


def test_a_replayed_step_never_waits_for_the_device() -> None:
    assert run_ranks(1, replays_without_waiting) == [True]


def replays_without_waiting() -> bool:
    config = digits("graph", precision="fp16", deterministic=False)
    with make_manager(config) as ddp:
        job = build_job(config, ImageClassification(config), ddp)
        train_step = make_step(job, config)
        for number, step in enumerate(job.loader.steps()):
            if number == 12:
                torch.cuda.set_sync_debug_mode("error")
            job.rates.set(number, 20)
            train_step(step)
            if number == 13:
                break
        torch.cuda.set_sync_debug_mode("default")
        return bool(train_step._graphs)  # type: ignore[attr-defined]


def test_a_graph_owns_the_memory_that_its_matrix_products_work_in() -> None:
    [(before, after)] = run_ranks(1, replay_while_others_give_memory_back)
    assert after == before


def replay_while_others_give_memory_back() -> tuple[float, float]:
    """As Lightning does when it begins and when it ends. The products are large enough to need a
    workspace."""
    leave_default_stream(torch.device("cuda", 0), "graph")
    layer = nn.Linear(4096, 4096, device="cuda", dtype=torch.bfloat16)
    total = torch.zeros((), device="cuda")

    def run(step: Step) -> None:
        for micro in step.micro_batches:
            layer.zero_grad(set_to_none=False)
            layer(micro.data).square().sum().backward()
            assert layer.weight.grad is not None
            total.copy_(layer.weight.grad.float().norm())

    batch = MicroBatch(torch.ones(64, 4096, device="cuda", dtype=torch.bfloat16), 64, True, 0, True)
    plan = plan_step(Cursor(), length=64, sharding=Sharding(batch_size=64, rank=0, world_size=1))
    for _ in range(3):
        run(Step(plan, iter([batch])))
    step = Step(plan, iter([batch]))
    shape = Shape(step, [batch])
    captured = CapturedStep(run, step, [batch], shape, torch.cuda.graph_pool_handle())
    captured.replay(shape)
    before = total.item()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    captured.replay(shape)
    return before, total.item()


def test_saves_that_end_while_a_step_is_watched_or_captured_leave_no_trace(tmp_path: Path) -> None:
    run_ranks(1, train_with_saves_that_end_in_steps, tmp_path)
    assert not [message for message in messages(tmp_path) if "because" in message]
    assert newest(tmp_path).documents["progress"]["step"] == STEPS_OF_AN_EPOCH


def train_with_saves_that_end_in_steps(run: Path) -> None:
    """Each is on its way when the next step begins; the watched and the captured one wait for it in
    their midst."""
    write = store.write
    observed = graph.observed
    capture = CapturedStep.__init__

    def write_late(*args: Any, **options: Any) -> Path:
        time.sleep(0.2)
        return write(*args, **options)

    def wait_for_saves() -> None:
        for thread in threading.enumerate():
            if thread.name == "drumline-checkpoint":
                thread.join()

    @contextmanager
    def observed_until_saved(*args: Any) -> Iterator[list[str]]:
        with observed(*args) as reasons:
            yield reasons
            wait_for_saves()

    def capture_until_saved(self: CapturedStep, inner: Callable[[Step], None], *rest: Any) -> None:
        def take_until_saved(step: Step) -> None:
            inner(step)
            wait_for_saves()

        capture(self, take_until_saved, *rest)

    store.write = write_late
    graph.observed = observed_until_saved
    CapturedStep.__init__ = capture_until_saved
    config = digits("graph", steps=STEPS_OF_AN_EPOCH)
    train_here(replace(config, checkpoint=CheckpointConfig(every_steps=1, keep_last=2)), run)

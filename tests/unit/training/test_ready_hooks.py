"""The hooks that come with Drumline."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.base.errors import UsageError
from drumline.config.schema import Config, TrainConfig
from drumline.training.tasks.base import Task
from drumline.training.tasks.hook import Run
from drumline.training.tasks.ready_hooks import EMA, EarlyStopping, LogSamples, Unfreeze


def make_run(model: nn.Module | None = None, **settings: Any) -> Run:
    model = model or nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2)
    )
    defaults: dict[str, Any] = {
        "task": None,
        "model": model,
        "_optimizer": torch.optim.SGD(
            [parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1
        ),
        "config": Config(),
        "total_steps": 10,
        "rank": 0,
        "world_size": 1,
        "device": torch.device("cpu"),
        "folder": Path(),
        "_report": lambda *_, **__: None,
    }
    return Run(**{**defaults, **settings})


class Tied(nn.Module):
    """One weight under two names, a buffer that no checkpoint holds, and weights of 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4, dtype=torch.bfloat16)
        self.head = nn.Linear(4, 5, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embedding.weight
        self.register_buffer("cache", torch.ones(2), persistent=False)


def test_the_average_has_every_tensor_of_a_checkpoint_once() -> None:
    model = Tied()
    ema = EMA(0.5)
    run = make_run(model)
    ema.start(run)
    assert {name: tensor.dtype for name, tensor in ema.average.items()} == {
        "embedding.weight": torch.float32
    }
    before = model.embedding.weight.detach().float().clone()
    with torch.no_grad():
        model.embedding.weight.add_(1.0)
    ema.after_step(run)
    expected = 0.5 * before + 0.5 * model.embedding.weight.float()
    assert torch.allclose(ema.average["embedding.weight"], expected)


def test_an_evaluation_has_the_average_and_training_goes_on_with_the_weights() -> None:
    run = make_run()
    ema = EMA(0.9)
    ema.start(run)
    with torch.no_grad():
        for tensor in run.model.state_dict().values():
            tensor.add_(1)
    ema.after_step(run)
    trained = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    norm: Any = list(run.model.children())[1]
    norm.running_mean = norm.running_mean.clone()  # as a forward pass may
    ema.before_evaluation(run)
    assert all(
        torch.equal(tensor, ema.average[name]) for name, tensor in run.model.state_dict().items()
    )
    assert not torch.equal(run.model.state_dict()["0.weight"], trained["0.weight"])
    assert torch.equal(
        run.model.state_dict()["1.num_batches_tracked"], trained["1.num_batches_tracked"]
    )
    ema.after_evaluation(run)
    assert all(
        torch.equal(tensor, trained[name]) for name, tensor in run.model.state_dict().items()
    )


def test_a_resumed_average_lies_in_memory_like_the_weights() -> None:
    model = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    ema = EMA(0.5)
    ema.load_state_dict(
        {"average": {name: tensor.contiguous() for name, tensor in model.state_dict().items()}}
    )
    ema.start(make_run(model))
    assert ema.average["weight"].stride() == model.weight.stride()
    assert torch.equal(ema.average["weight"], model.weight)


def test_an_average_of_another_model_is_refused() -> None:
    ema = EMA()
    ema.load_state_dict({"average": {"0.weight": torch.zeros(2)}})
    with pytest.raises(UsageError, match=r"(?s)is of another model: 0.bias, 1.bias, .*--fresh"):
        ema.start(make_run())


@pytest.mark.parametrize("decay", [1.0, -0.1, math.nan])
def test_a_decay_is_below_one(decay: float) -> None:
    with pytest.raises(
        UsageError, match=f"EMA's decay is {decay}\n  try: use a number from 0 up to"
    ):
        EMA(decay)


def stops_after(hook: EarlyStopping, values: list[float]) -> int | None:
    """After which evaluation, counted from 1."""
    run = make_run()
    for number, value in enumerate(values, 1):
        run.metrics = {"loss": value, "accuracy": value, "val/loss": value}
        hook.after_evaluation(run)
        if run.stop_reason is not None:
            return number
    return None


@pytest.mark.parametrize(
    ("make", "values", "expected"),
    [
        (lambda: EarlyStopping("loss", 2), [3.0, 2.0, 2.0, 1.9, 1.9, 1.9, 0.0], 6),
        (lambda: EarlyStopping("loss", 2), [3.0, 2.0, 2.5, 1.0], None),
        (lambda: EarlyStopping("loss", 2, min_delta=0.5), [3.0, 2.6, 2.5, 1.0], 3),
        (lambda: EarlyStopping("loss", 2), [math.nan, 2.0, math.nan, math.inf], 4),
        (lambda: EarlyStopping("accuracy", 1, higher_is_better=True), [0.5, 0.6, 0.6], 3),
    ],
)
def test_it_stops_when_nothing_has_improved(
    make: Callable[[], EarlyStopping], values: list[float], expected: int | None
) -> None:
    assert stops_after(make(), values) == expected


@pytest.mark.parametrize(
    ("metric", "best", "higher", "expected"),
    [
        ("accuracy", "accuracy", True, None),
        ("accuracy", "accuracy", False, 2),
        ("val/loss", "accuracy", True, 2),
        ("loss", "loss", False, 2),
    ],
)
def test_the_task_knows_whether_higher_is_better(
    metric: str, best: str, higher: bool, expected: int | None
) -> None:
    hook = EarlyStopping(metric, 1)
    hook.start(make_run(task=SimpleNamespace(best_metric=best, higher_is_better=higher)))
    assert stops_after(hook, [0.5, 0.6, 0.7]) == expected


def test_which_values_are_better_must_be_known() -> None:
    run = make_run(task=SimpleNamespace(best_metric="loss", higher_is_better=False))
    with pytest.raises(
        UsageError, match="a higher f1 is better is not known\n  try: give EarlyStopping higher_is"
    ):
        EarlyStopping("f1").start(run)
    EarlyStopping("f1", higher_is_better=False).start(run)


def test_without_evaluations_it_warns(caplog: pytest.LogCaptureFixture) -> None:
    for rank in (0, 1):
        EarlyStopping(higher_is_better=False).start(
            make_run(rank=rank, has_eval_data=False, task=Task(Config()))
        )
    assert [record.getMessage() for record in caplog.records] == [
        "EarlyStopping never stops this run: there is no eval_data(), so nothing is evaluated"
    ]


def test_a_stopped_run_that_is_made_longer_counts_anew() -> None:
    hook = EarlyStopping("loss", 2)
    assert stops_after(hook, [1.0, 2.0, 2.0]) == 3
    assert stops_after(hook, [2.0, 2.0]) == 2


def test_a_resumed_one_counts_on() -> None:
    first = EarlyStopping("loss", 3)
    second = EarlyStopping("loss", 3)
    assert stops_after(first, [1.0, 2.0, 2.0]) is None
    second.load_state_dict(first.state_dict())
    run = make_run()
    run.metrics = {"loss": 1.5}
    second.after_evaluation(run)
    assert run.stop_reason == "loss has not improved in 3 evaluations; the best was 1"


def test_a_metric_that_is_not_reported_is_named() -> None:
    run = make_run()
    run.metrics = {"loss": 1.0, "accuracy": 0.5, "confusion": [[1, 0], [0, 1]]}
    for metric, names in (
        ("acuracy", "did you mean 'accuracy'?"),
        ("confusion", "known: accuracy, loss"),
    ):
        with pytest.raises(UsageError) as caught:
            EarlyStopping(metric).after_evaluation(run)
        assert caught.value.what == f"the evaluation does not report {metric!r}: {names}"
    with pytest.raises(UsageError, match=r"EarlyStopping has patience 0 and min_delta 0\.0"):
        EarlyStopping("loss", 0)


def test_parameters_are_frozen_until_their_step_whenever_the_run_starts() -> None:
    for first, trained in ((0, False), (3, False), (4, True), (9, True)):
        run = make_run(step=first)
        hook = Unfreeze("0.", "1.weight", at_step=4)
        hook.start(run)
        flags = {name: parameter.requires_grad for name, parameter in run.model.named_parameters()}
        frozen = {name for name in flags if not flags[name]}
        assert frozen == (set() if trained else {"0.weight", "0.bias", "1.weight"})
        run.step = 4
        hook.after_step(run)
        assert all(parameter.requires_grad for parameter in run.model.parameters())


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"world_size": 2}, "the ranks would wait for the gradients of frozen parameters"),
        (
            {"config": Config(train=TrainConfig(exact="elastic"))},
            "the ranks would wait for the gradients of frozen parameters",
        ),
    ],
)
def test_a_step_that_fixes_what_has_gradients_is_refused(
    settings: dict[str, Any], what: str
) -> None:
    with pytest.raises(UsageError, match=rf"{what}\n  try: "):
        Unfreeze("0.", at_step=4).start(make_run(**settings))


def test_what_cannot_be_unfrozen_is_named() -> None:
    with pytest.raises(
        UsageError, match=r"no parameter's name begins with '0\.wait': did you mean '0\.weight'\?"
    ):
        Unfreeze("1.", "0.wait", at_step=4).start(make_run())
    model = nn.Sequential(nn.Linear(3, 4).requires_grad_(False), nn.Linear(4, 2))
    with pytest.raises(
        UsageError,
        match=r"0\.weight is not in the optimizer, so it cannot be unfrozen\n  try: leave",
    ):
        Unfreeze("0.", at_step=4).start(make_run(model))


def predict(model: nn.Module, batch: Tensor) -> Tensor:
    assert not model.training
    assert not torch.is_grad_enabled()
    return model(functional.dropout(batch))


def test_samples_are_logged_and_nothing_of_the_training_changes() -> None:
    logged = []
    task = SimpleNamespace(predict=predict, on_device=lambda batch: batch * 2)
    bf16 = torch.autocast("cpu", dtype=torch.bfloat16)
    run = make_run(task=task, _autocast=bf16, _report=lambda kind, **fields: logged.append(fields))
    list(run.model.children())[2].eval()  # for good
    modes = [module.training for module in run.model.modules()]
    state = torch.get_rng_state()
    weights = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    hook = LogSamples(
        torch.ones(2, 3),
        show=lambda outputs: [f"{output.argmax()} {output.dtype}" for output in outputs],
    )
    hook.after_evaluation(run)
    assert [fields["name"] for fields in logged] == ["samples/0", "samples/1"]
    assert all(
        fields["type"] == "text" and fields["value"].endswith("bfloat16") for fields in logged
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in run.model.modules()] == modes
    assert all(
        torch.equal(tensor, weights[name]) for name, tensor in run.model.state_dict().items()
    )


def test_samples_come_every_so_many_steps_or_after_evaluations() -> None:
    logged = []
    task = SimpleNamespace(predict=lambda model, batch: "text", on_device=lambda batch: batch)
    run = make_run(task=task, _report=lambda kind, **fields: logged.append(fields))
    hook = LogSamples(None, every_steps=7, name="story")
    assert hook.every_steps == 7
    hook.after_evaluation(run)
    assert logged == []
    hook.after_step(run)
    assert [(fields["name"], fields["value"]) for fields in logged] == [("story", "text")]


def test_a_run_that_only_evaluates_writes_nothing_and_has_no_optimizer(tmp_path: Path) -> None:
    run = make_run(folder=tmp_path, _report=None, _optimizer=None)
    run.log("picture", torch.zeros(2, 2))
    assert not list(tmp_path.iterdir())
    with pytest.raises(
        UsageError, match=r"is evaluated without an optimizer\n  try: keep what before_evaluation"
    ):
        _ = run.optimizer

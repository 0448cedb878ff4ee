from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, Muon, NAdam, Optimizer

from drumline.base.errors import UsageError
from drumline.config.schema import OptimConfig
from drumline.training.job.optimizer import (
    check_own_optimizer,
    check_steps,
    find_uncapturable,
    group_settings,
    group_state,
    make_optimizer,
    set_capturable,
)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Embedding(7, 4), nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2, bias=False)
    )


def shapes(optimizer: Optimizer) -> list[list[tuple[int, ...]]]:
    return [
        [tuple(parameter.shape) for parameter in group["params"]]
        for group in optimizer.param_groups
    ]


def test_an_optimizer_of_torch_by_its_dotted_name() -> None:
    options = {"momentum_decay": 0.01, "betas": "0.8,0.99", "decoupled_weight_decay": True}
    optim = OptimConfig(name="torch.optim.NAdam", weight_decay=0.3, options=options)
    optimizer = make_optimizer(network(), optim, lr=0.2)
    assert type(optimizer) is NAdam
    assert shapes(optimizer) == [[(7, 4), (6, 4), (2, 6)], [(6,), (6,), (6,)]]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    first = optimizer.param_groups[0]
    assert (first["lr"], first["momentum_decay"], first["betas"]) == (0.2, 0.01, (0.8, 0.99))
    assert first["decoupled_weight_decay"] is True


class OwnKind(Optimizer):
    """Takes no weight decay."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})


def test_one_of_the_users_own_gets_one_group_where_it_takes_no_decay() -> None:
    optimizer = make_optimizer(network(), OptimConfig(name=f"{__name__}.OwnKind"), lr=0.2)
    assert type(optimizer) is OwnKind
    assert shapes(optimizer) == [[(7, 4), (6, 4), (6,), (6,), (6,), (2, 6)]]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"name": "torch.optim.NAdm"}, "torch.optim has no class 'NAdm'; did you mean 'NAdam'?"),
        ({"name": "torch.nn.Linear"}, "torch.nn.Linear is not a torch optimizer"),
        ({"name": "nowhere.Lion"}, "there is no module 'nowhere' on the Python path"),
        (
            {"options": {"momentun": 0.5}},
            "the optimizer sgd takes no option 'momentun'; did you mean 'momentum'?",
        ),
        (
            {"options": {"lr": 0.5}},
            "--optim.options.lr is not an option\n  try: give it as --optim.lr",
        ),
        ({"options": {"dampening": "x"}}, "the optimizer sgd does not accept its settings: "),
        (
            {"name": "muon", "options": {"ns_step": 3}},
            "the optimizer muon takes no option 'ns_step'; did you mean",
        ),
        (
            {"name": "muon", "options": {"momentum": -1.0}},
            "the optimizer muon does not accept its settings: momentum",
        ),
        (
            {"name": "torch.optim.SGD", "options": {"momentum": -1.0}},
            "Invalid momentum value: -1.0",
        ),
        ({"name": "torch.optim.LBFGS"}, "LBFGS.step() needs a closure"),
    ],
)
def test_a_wrong_name_or_option_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=re.escape(sentence)):
        make_optimizer(network(), OptimConfig(**settings), lr=0.1)


def test_muon_takes_the_matrices_and_adamw_the_rest() -> None:
    optimizer = make_optimizer(network(), OptimConfig(name="muon", weight_decay=0.3), lr=0.2)
    assert shapes(optimizer) == [[(6, 4), (2, 6)], [(7, 4)], [(6,), (6,), (6,)]]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.3, 0.0]
    assert optimizer.param_groups[0]["adjust_lr_fn"] == "match_rms_adamw"
    with pytest.raises(UsageError, match="the optimizer muon does not accept its settings: "):
        make_optimizer(nn.LayerNorm(3), OptimConfig(name="muon"), lr=0.2)


def test_muon_steps_as_the_two_of_torch_do_also_after_a_state_is_loaded() -> None:
    optim = OptimConfig(name="muon", weight_decay=0.3, betas=(0.8, 0.9))
    trained = network()
    reference = network()
    optimizer = make_optimizer(trained, optim, lr=0.2)
    embedding, matrix, *flat, last = reference.parameters()
    separate: list[Optimizer] = [
        Muon([matrix, last], lr=0.2, weight_decay=0.3, adjust_lr_fn="match_rms_adamw"),
        AdamW(
            [{"params": [embedding], "weight_decay": 0.3}, {"params": flat}],
            0.2,
            betas=(0.8, 0.9),
            weight_decay=0,
        ),
    ]
    for number in range(4):
        if number == 2:  # as a resumed run does
            state = optimizer.state_dict()
            optimizer = make_optimizer(trained, optim, lr=0.2)
            optimizer.load_state_dict(state)
        for model in (trained, reference):
            (model(torch.arange(7)) ** 3).sum().backward()
        for each in (optimizer, *separate):
            each.step()
            each.zero_grad()
    for left, right in zip(trained.parameters(), reference.parameters(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize(
    ("kind", "skips", "reason"),
    [
        (lambda p: SGD(p, lr=0.1, fused=True), True, None),
        (lambda p: AdamW(p, lr=0.1), False, None),
        (lambda p: NAdam(p, lr=0.1), False, None),
        (
            lambda p: NAdam(p, lr=0.1),
            True,
            "NAdam is not fused, so --train.on_nan skip waits for the device in every step",
        ),
        (lambda p: SGD(p, lr=0.1), False, "SGD reads its rate on the host unless it is fused"),
        (lambda p: Adagrad(p, lr=0.1), False, "Adagrad reads its rate on the host"),
    ],
)
def test_what_can_be_captured_reads_its_rate_on_the_device(
    kind: Any, skips: bool, reason: str | None
) -> None:
    optimizer = kind(network().parameters())
    assert find_uncapturable(optimizer, "skip" if skips else "stop") == reason
    (group,) = optimizer.param_groups
    if reason is None:
        before = {**group, "lr": pytest.approx(0.1)}
        built = group_settings(optimizer)
        set_capturable(optimizer, built, is_on=True)
        assert isinstance(group["lr"], Tensor)
        assert group.get("capturable", True)
        set_capturable(optimizer, built, is_on=False)
        assert group == before


def test_a_second_captured_step_gets_the_tensors_of_the_first_one() -> None:
    """Its graph reads and writes them."""
    optimizer = Adam(parameters := list(network().parameters()), lr=0.1, capturable=True)
    built = group_settings(optimizer)
    optimizer.state[parameters[0]] = {"step": torch.tensor(3.0)}
    momenta = []
    for _ in range(2):
        set_capturable(optimizer, built, is_on=True)
        momenta.append((optimizer.param_groups[0]["lr"], optimizer.state[parameters[0]]["step"]))
    assert all(before is after for before, after in zip(*momenta, strict=True))
    set_capturable(optimizer, built, is_on=False)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    assert optimizer.param_groups[0]["capturable"], "as it was built"


def test_muon_cannot_be_captured() -> None:
    optimizer = make_optimizer(network(), OptimConfig(name="muon"), lr=0.2)
    assert find_uncapturable(optimizer, "stop") == "muon reads its rate on the host"


class WithoutRate(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


def test_an_own_optimizer_must_train_the_whole_model() -> None:
    model = network()
    second_model = network()
    replaced = SGD(model.parameters(), lr=0.1)
    check_own_optimizer(replaced, model, maker="X.optimizer()")
    wrong: list[tuple[Any, str]] = [
        ([replaced], "X.optimizer() returned a list, not a torch.optim.Optimizer"),
        (
            SGD(second_model.parameters(), lr=0.1),
            "X.optimizer() holds a parameter that the model does not have",
        ),
        (
            SGD([next(model.parameters())], lr=0.1),
            "X.optimizer() leaves out parameters that get gradients: 1.weight",
        ),
        (
            WithoutRate(model.parameters()),
            "WithoutRate has a parameter group without lr, which the schedule sets",
        ),
        (LBFGS(model.parameters()), "LBFGS.step() needs a closure that computes the loss again"),
    ]
    for optimizer, sentence in wrong:
        with pytest.raises(UsageError, match=re.escape(sentence)):
            check_own_optimizer(optimizer, model, maker="X.optimizer()")
    for parameter in list(model.parameters())[1:]:
        parameter.requires_grad = False
    check_own_optimizer(SGD([next(model.parameters())], lr=0.1), model, maker="X.optimizer()")


def test_a_closure_that_may_be_left_out_is_no_hindrance() -> None:
    optimizer = AdamW(network().parameters())
    check_steps(optimizer)


def test_what_an_optimizer_changes_in_its_groups_is_state() -> None:
    first, second = nn.Linear(2, 2).parameters()
    optimizer = SGD(
        [{"params": [first]}, {"params": [second], "weight_sum": 0.0}], lr=0.1, momentum=0.9
    )
    for group in optimizer.param_groups:
        group["seen"] = [1, 2]
    built = group_settings(optimizer)
    assert group_state(optimizer, built) == [[], []]
    optimizer.param_groups[0]["seen"].append(3)
    optimizer.param_groups[0]["lr"] = 0.2  # the schedule's
    optimizer.param_groups[1].update(weight_sum=0.5, momentum=torch.tensor(0.9))
    assert group_state(optimizer, built) == [["seen"], ["weight_sum", "momentum"]]

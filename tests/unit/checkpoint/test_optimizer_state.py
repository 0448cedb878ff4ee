from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from drumline.base.errors import CheckpointError
from drumline.checkpoint import store
from drumline.checkpoint.optimizer_state import load_optimizer_state, optimizer_state
from drumline.runs import catalog

Make = Callable[[nn.Module], Optimizer]


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def two_groups(model: nn.Module) -> Optimizer:
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    rest = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    return AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "lr": 0.02}],
        lr=0.01,
        betas=(0.8, 0.9),
    )


class Unusual(Optimizer):
    """What a user's optimizer may hold: numbers, text, nested tensors, other types, shared state,
    own entries."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "schedule": [(0, 0.1), (10, None)]})
        self.temperature = 1.0

    def step(self, closure: Any = None) -> None:
        self.temperature *= 0.9
        self.state["shared"]["calls"] = self.state["shared"].get("calls", 0) + 1
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("seen", 0)
            state["seen"] += 1
            state["mode"] = "warm"
            state["last"] = None
            state["history"] = [*state.get("history", []), (state["seen"], parameter.grad.clone())]
            state["packed"] = (parameter.grad * 100).to(torch.int8)
            state["exact"] = (
                state.get("exact", torch.zeros_like(parameter).double()) + parameter.grad
            )
            parameter.data.sub_(0.1 * state["exact"].to(parameter.dtype) * self.temperature)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "temperature": self.temperature}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.temperature = state_dict["temperature"]


MAKERS: dict[str, Make] = {
    "sgd": lambda model: SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda model: AdamW(model.parameters(), lr=0.01),
    "adamw_fused": lambda model: AdamW(model.parameters(), lr=0.01, fused=True),
    "adamw_amsgrad": lambda model: AdamW(model.parameters(), lr=0.01, amsgrad=True),
    "adamw_tensor_rate": lambda model: AdamW(
        model.parameters(), lr=torch.tensor(0.01), foreach=False
    ),
    "two_groups": two_groups,
    "named": lambda model: AdamW(model.named_parameters(), lr=0.01),
    "lbfgs": lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1),
    "unusual": lambda model: Unusual(model.parameters()),
}


def train(model: nn.Module, optimizer: Optimizer, *, steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))

        def loss(inputs: Tensor = inputs) -> Tensor:
            optimizer.zero_grad()
            total: Tensor = model(inputs.to(next(model.parameters()).dtype)).square().mean()
            total.backward()
            return total

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(loss)
        else:
            loss()
            optimizer.step()


def assert_same(first: Any, second: Any) -> None:
    """Equal in every bit and every type."""
    assert type(first) is type(second)
    if isinstance(first, Tensor):
        assert first.dtype == second.dtype
        assert torch.equal(first, second)
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            assert_same(first[key], second[key])
    elif isinstance(first, list | tuple):
        assert len(first) == len(second)
        for first_item, second_item in zip(first, second, strict=True):
            assert_same(first_item, second_item)
    else:
        assert first == second


def through_disk(
    root: Path, tensors: dict[str, Tensor], document: dict[str, Any]
) -> tuple[dict[str, Tensor], Any]:
    path = store.write(root, 1, tensors={"o": tensors}, documents={"o": document}, metrics={})
    return store.read(path).tensors["o"], catalog.read_document(path, "o")


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("steps", [0, 3])
def test_resumes_bit_for_bit(tmp_path: Path, name: str, steps: int) -> None:
    model = make_model()
    optimizer = MAKERS[name](model)
    train(model, optimizer, steps=steps)
    # as a schedule would
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * 0.3
    loaded_model = copy.deepcopy(model)
    resumed = MAKERS[name](loaded_model)
    load_optimizer_state(
        loaded_model, resumed, *through_disk(tmp_path, *optimizer_state(model, optimizer))
    )
    assert_same(resumed.state_dict(), optimizer.state_dict())
    train(model, optimizer, steps=3, start=steps)
    train(loaded_model, resumed, steps=3, start=steps)
    assert all(
        torch.equal(parameter, loaded_parameter)
        for parameter, loaded_parameter in zip(
            model.parameters(), loaded_model.parameters(), strict=True
        )
    )


def test_state_has_the_names_of_parameters() -> None:
    model = make_model()
    optimizer = two_groups(model)
    train(model, optimizer, steps=1)
    tensors, document = optimizer_state(model, optimizer)
    assert {
        "0.weight/exp_avg",
        "0.weight/exp_avg_sq",
        "0.weight/step",
        "2.bias/step",
    } <= tensors.keys()
    assert [group["params"] for group in document["groups"]] == [
        ["0.weight", "2.weight"],
        ["0.bias", "2.bias"],
    ]
    assert "0.9" in json.dumps(document["groups"])
    assert (
        tensors["0.weight/exp_avg"].data_ptr()
        == optimizer.state[model[0].weight]["exp_avg"].data_ptr()
    )


def test_before_the_first_step_there_is_no_state() -> None:
    model = make_model()
    tensors, document = optimizer_state(model, AdamW(model.parameters()))
    assert tensors == {}
    assert document["state"] == {}


def test_the_order_of_parameters_does_not_matter() -> None:
    model = make_model()
    optimizer = AdamW(list(model.parameters()))
    train(model, optimizer, steps=2)
    reordered = AdamW(list(model.parameters())[::-1])
    load_optimizer_state(model, reordered, *optimizer_state(model, optimizer))
    for parameter in model.parameters():
        assert torch.equal(
            optimizer.state[parameter]["exp_avg"], reordered.state[parameter]["exp_avg"]
        )


def test_tied_parameters_and_names_with_slashes() -> None:
    model = nn.Module()
    model.register_module("a/b", nn.Linear(3, 3))
    model.register_module("c", nn.Linear(3, 3))
    model.c.weight = model.get_submodule("a/b").weight
    model.forward = lambda inputs: model.c(model.get_submodule("a/b")(inputs))
    optimizer = AdamW(model.parameters())
    train(model, optimizer, steps=1)
    tensors, document = optimizer_state(model, optimizer)
    assert document["groups"][0]["params"] == ["a/b.weight", "a/b.bias", "c.bias"]
    loaded = AdamW(model.parameters())
    load_optimizer_state(model, loaded, tensors, document)
    assert_same(loaded.state_dict(), optimizer.state_dict())


def test_loaded_state_is_a_copy() -> None:
    model = make_model()
    optimizer = AdamW(model.parameters())
    loaded = AdamW(model.parameters())
    train(model, optimizer, steps=1)
    tensors, document = optimizer_state(model, optimizer)
    load_optimizer_state(model, loaded, tensors, document)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    train(model, loaded, steps=1)
    assert all(torch.equal(before[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("saved_fused", [True, False])
def test_how_to_compute_is_not_taken_from_the_checkpoint(saved_fused: bool) -> None:
    model = make_model()
    optimizer = AdamW(model.parameters(), fused=saved_fused, foreach=False)
    train(model, optimizer, steps=2)
    loaded = AdamW(model.parameters(), fused=not saved_fused, foreach=False)
    load_optimizer_state(model, loaded, *optimizer_state(model, optimizer))
    assert loaded.param_groups[0]["fused"] is not saved_fused
    state = loaded.state[model[0].weight]
    assert (state["step"].item(), state["step"].dtype, state["step"].device.type) == (
        2,
        torch.float32,
        "cpu",
    )
    train(model, loaded, steps=1)


def test_a_rate_is_a_tensor_or_a_number_as_the_optimizer_has_it() -> None:
    model = make_model()
    number, tensor = (
        AdamW(model.parameters(), lr=rate, foreach=False) for rate in (0.25, torch.tensor(0.5))
    )
    in_graph = torch.tensor(0.0, dtype=torch.float64)
    receiver = AdamW(model.parameters(), lr=in_graph, foreach=False)
    load_optimizer_state(model, receiver, *optimizer_state(model, number))
    assert isinstance(receiver.param_groups[0]["lr"], Tensor)
    assert receiver.param_groups[0]["lr"].dtype == torch.float64
    assert receiver.param_groups[0]["lr"].item() == 0.25
    receiver = AdamW(model.parameters(), lr=0.1, foreach=False)
    load_optimizer_state(model, receiver, *optimizer_state(model, tensor))
    assert receiver.param_groups[0]["lr"] == 0.5
    assert isinstance(receiver.param_groups[0]["lr"], float)


class FloatStateOfHalf(Optimizer):
    """Keeps full-precision state for half-precision parameters, as good optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["exact"] = (
                state.get("exact", parameter.detach().float()) - 0.01 * parameter.grad.float()
            )
            parameter.data.copy_(state["exact"])


def test_state_of_another_type_than_its_parameter_keeps_its_bits(tmp_path: Path) -> None:
    model = make_model().bfloat16()
    optimizer = FloatStateOfHalf(model.parameters())
    train(model, optimizer, steps=3)
    loaded = FloatStateOfHalf(model.parameters())
    load_optimizer_state(model, loaded, *through_disk(tmp_path, *optimizer_state(model, optimizer)))
    for parameter in model.parameters():
        assert loaded.state[parameter]["exact"].dtype == torch.float32
        assert torch.equal(loaded.state[parameter]["exact"], optimizer.state[parameter]["exact"])


def test_state_of_its_parameter_s_type_follows_it() -> None:
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, steps=1)
    half = copy.deepcopy(model).bfloat16()
    loaded = SGD(half.parameters(), lr=0.1, momentum=0.9)
    load_optimizer_state(half, loaded, *optimizer_state(model, optimizer))
    assert loaded.state[half[0].weight]["momentum_buffer"].dtype == torch.bfloat16


def test_every_difference_is_listed_and_nothing_is_changed() -> None:
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, steps=1)
    tensors, document = optimizer_state(model, optimizer)
    wider = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.Linear(5, 1))
    receiver = SGD([*wider[2].parameters(), *wider[3].parameters()], lr=7.0)
    with pytest.raises(CheckpointError) as caught:
        load_optimizer_state(wider, receiver, tensors, document)
    assert str(caught.value).splitlines() == [
        "the checkpoint is of another optimizer:",
        "  - 3.weight is not in group 0 of the checkpoint",
        "  - 3.bias is not in group 0 of the checkpoint",
        "  - 0.weight is not in group 0 here",
        "  - 0.bias is not in group 0 here",
        "  - 2.weight is [2, 4] in the checkpoint and [5, 4] here",
        "  - 2.bias is [2] in the checkpoint and [5] here",
        "  try: set up the model and the optimizer as for the checkpoint (see config.toml in the run folder)",
    ]
    assert receiver.param_groups[0]["lr"] == 7.0


def test_another_class_is_named_and_one_of_an_earlier_version_is_not_asked_for() -> None:
    model = make_model()
    tensors, document = optimizer_state(model, SGD(model.parameters(), lr=0.1))
    with pytest.raises(
        CheckpointError, match="\n  - the optimizer is SGD in the checkpoint and AdamW here\n"
    ):
        load_optimizer_state(model, AdamW(model.parameters()), tensors, document)
    del document["class"]
    load_optimizer_state(model, SGD(model.parameters()), tensors, document)


def test_another_number_of_groups() -> None:
    model = make_model()
    with pytest.raises(
        CheckpointError, match="it has 2 parameter groups in the checkpoint and 1 here"
    ):
        load_optimizer_state(
            model, SGD(model.parameters()), *optimizer_state(model, two_groups(model))
        )


def test_a_parameter_that_is_not_the_model_s() -> None:
    model = make_model()
    optimizer = SGD([{"params": model.parameters()}, {"params": [nn.Parameter(torch.zeros(7))]}])
    text = r"group 1 of the optimizer holds a parameter of shape \[7\] that the model does not have\n  try: build"
    with pytest.raises(CheckpointError, match=text):
        optimizer_state(model, optimizer)

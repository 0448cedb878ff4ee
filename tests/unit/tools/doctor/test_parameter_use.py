"""`drumline doctor TASK`: which parameters some batches use, and what has to be set for several
ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drumline.config.schema import Config, DistConfig, TrainConfig
from drumline.rank.determinism import seed_rank
from drumline.tools.doctor.parameter_use import ParameterUse, measure_use, use_findings
from drumline.training.job.job import make_manager
from drumline.training.tasks.base import Loss, Task
from tests.jobs import Classify, make_config

ALL = ParameterUse(num_trained=6, num_batches=8, unused={})
NEVER = ParameterUse(num_trained=6, num_batches=8, unused={"a": 8, "b": 8})
SOMETIMES = ParameterUse(num_trained=6, num_batches=8, unused={"a": 8, "b": 3})
FINDS = DistConfig(find_unused_parameters=True)
STATIC = DistConfig(static_graph=True)
FREEZE = "freeze them (requires_grad=False), or set "


@pytest.mark.parametrize(
    ("use", "config", "line", "fix"),
    [
        (
            ALL,
            Config(dist=FINDS),
            "note: mine: --dist.find_unused_parameters costs time in every step, and each of 8 batches uses all "
            "parameters",
            "leave it off, unless other batches or a hook leave some out",
        ),
        (
            NEVER,
            Config(),
            "problem: mine: none of 8 batches uses a and b: several ranks would wait for the gradients",
            f"{FREEZE}--dist.static_graph, since all batches use the others",
        ),
        (
            NEVER,
            Config(train=TrainConfig(exact="elastic"), dist=STATIC),
            "problem: mine: none of 8 batches uses a and b: several ranks would wait for the gradients",
            f"{FREEZE}--dist.find_unused_parameters",
        ),
        (
            NEVER,
            Config(dist=FINDS),
            "note: mine: none of 8 batches uses a and b, and all batches use the others",
            "set --dist.static_graph in place of --dist.find_unused_parameters, which costs time",
        ),
        (
            SOMETIMES,
            Config(),
            "problem: mine: batches use different parameters: a (unused in 8 of 8) and b (unused in 3 of 8); several "
            "ranks would wait for gradients",
            "set --dist.find_unused_parameters",
        ),
        (
            SOMETIMES,
            Config(dist=STATIC),
            "problem: mine: batches use different parameters: a (unused in 8 of 8) and b (unused in 3 of 8); several "
            "ranks would wait for gradients",
            "set --dist.find_unused_parameters in place of --dist.static_graph",
        ),
        *(
            (
                SOMETIMES,
                Config(dist=DistConfig(mode=mode)),  # type: ignore[arg-type]
                "problem: mine: batches use different parameters: a (unused in 8 of 8) and b (unused in 3 of 8); "
                "several ranks would wait for gradients",
                "set --dist.find_unused_parameters",
            )
            for mode in ("auto", "zero1", "fsdp", "hsdp")
        ),
    ],
)
def test_what_has_to_be_set(use: ParameterUse, config: Config, line: str, fix: str) -> None:
    [finding] = use_findings(use, config, task="mine")
    assert (finding.line(), finding.fix) == (line, fix)


@pytest.mark.parametrize(
    ("use", "dist"),
    [
        (ALL, DistConfig()),
        (ALL, STATIC),
        (NEVER, STATIC),
        (SOMETIMES, FINDS),
        (NEVER, DistConfig(mode="fsdp")),
        (SOMETIMES, DistConfig(mode="fsdp", find_unused_parameters=True)),
        (SOMETIMES, DistConfig(sync="local:8")),
    ],
)
def test_what_is_set_already_or_needs_nothing_is_no_finding(
    use: ParameterUse, dist: DistConfig
) -> None:
    assert use_findings(use, Config(dist=dist), task="mine") == []


recorded: dict[str, Any] = {}


class Branches(Classify):
    """One layer is never used, one at random, one is frozen; BatchNorm counts batches, and the task
    its calls."""

    calls = 0

    def model(self) -> nn.Module:
        model = nn.ModuleDict(
            {name: nn.Linear(6, 6).double() for name in ("always", "never", "random", "frozen")}
        )
        model["frozen"].requires_grad_(False)
        model["head"] = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2)).double()
        recorded["model"] = model
        recorded["weights"] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        recorded["task"] = self
        return model

    def loss(self, model: Any, batch: tuple[Tensor, Tensor]) -> Loss:
        self.calls += 1
        assert torch.is_grad_enabled()
        assert model.training
        hidden = model["always"](model["frozen"](batch[0]))
        if torch.rand(()) < 0.5:
            hidden = hidden + model["random"](hidden)
        return Loss(nn.functional.cross_entropy(model["head"](hidden), batch[1], reduction="sum"))


def use_of(task: type[Task], config: Config, most: int) -> ParameterUse:
    ddp = make_manager(replace(config, dist=replace(config.dist, same_code=False)))
    ddp.setup()
    try:
        return measure_use(config, task, ddp, most=most)
    finally:
        ddp.cleanup()


def test_batches_are_run_and_nothing_is_changed() -> None:
    # into the third epoch
    use = use_of(Branches, make_config(batch_size=8, samples=37), 12)
    state = torch.get_rng_state()
    seed_rank(0, 0)  # as after the model was wrapped
    assert torch.equal(state, torch.get_rng_state())
    assert (use.num_trained, use.num_batches) == (10, 12)
    assert use.unused.keys() == {"never.weight", "never.bias", "random.weight", "random.bias"}
    assert use.unused["never.bias"] == 12
    assert 0 < use.unused["random.bias"] < 12, "random numbers continue"
    assert use.never == ["never.weight", "never.bias"]
    assert not use.is_static
    assert use.row() == "10 trained, 4 unused in one or more of 12 batches"
    assert recorded["task"].calls == 0
    after = recorded["model"].state_dict()
    for name, tensor in recorded["weights"].items():
        assert torch.equal(tensor, after[name]), name
    assert all(parameter.grad is None for parameter in recorded["model"].parameters())


def test_a_task_that_uses_everything() -> None:
    use = use_of(Classify, make_config(), 3)
    assert (use.unused, use.is_static) == ({}, True)
    assert use.row() == "4 trained, none unused in one or more of 3 batches"

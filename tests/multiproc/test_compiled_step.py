"""`--train.step compile` on the CPU: the same training as operation by operation, and a fall back
in one sentence."""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.config.schema import Config, DistConfig, OptimConfig
from drumline.rank.watched import job_connection
from drumline.runs.events import read_events
from drumline.training.job.job import Progress, make_manager
from drumline.training.run import TrainingRun
from drumline.training.run_context import RunRequest
from drumline.training.tasks.base import Loss
from drumline.training.tasks.hook import Hook, Run
from drumline.watch.heartbeat import HeartbeatWriter, Phase, read_heartbeat
from tests.jobs import Classify, make_config, newest, train_here
from tests.ranks import run_ranks

# The last of its five batches is short, and not compiled.
SHORT = replace(
    make_config(epochs=1, optim=OptimConfig(lr=0.1, weight_decay=0.1)),
    dist=DistConfig(find_unused_parameters=True),
)


# Compilers take minutes on a busy machine.
pytestmark = pytest.mark.timeout(400)


class TwoHeads(nn.Module):
    """One is trained, the other is only looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.head = nn.Linear(8, 2)
        self.probe = nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(inputs))
        return self.head(hidden), self.probe(hidden)


class Probed(Classify):
    """A loss with all that it may have: a weight on the device, a count, and a metric that has a
    graph."""

    def model(self) -> nn.Module:
        return TwoHeads().double()

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        inputs, targets = batch
        scores, probed = model(inputs)
        return Loss(
            functional.cross_entropy(scores, targets, reduction="sum"),
            weight=(targets + 1).sum(),
            metrics={
                "accuracy": (scores.argmax(1) == targets).sum(),
                "probe": functional.cross_entropy(probed, targets, reduction="sum"),
            },
        )


def refuse_to_compile(*given: Any) -> None:
    raise NotImplementedError("no compiler knows this backward pass")


TIMEOUT_S = 4.0
SLOW_S = 5.5


class Disturbs(Hook):
    """Rank 1 compiles for longer than a collective may take; after eight steps a number of the loss
    changes."""

    def start(self, run: Run) -> None:
        slept: list[None] = []

        def compile_slowly(_: object) -> None:
            if run.rank == 1 and not slept:
                slept.append(time.sleep(SLOW_S))

        torch._dynamo.on_compile_start(compile_slowly)

    def after_step(self, run: Run) -> None:
        if run.step == 8:
            run.task.scale = 2.0  # type: ignore[attr-defined]


class Uneven(Classify):
    """On rank 1 its graph breaks."""

    scale = 1.0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.breaks = os.environ["RANK"] == "1"

    def hooks(self) -> list[Hook]:
        return [Disturbs()]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        inputs, targets = batch
        scores = model(inputs)
        if self.breaks:
            torch._dynamo.graph_break()
        return Loss(
            functional.cross_entropy(scores, targets, reduction="sum") * self.scale,
            metrics={"accuracy": (scores.argmax(1) == targets).sum()},
        )


def train_unevenly(config: Config, run: Path) -> None:
    rank = os.environ["RANK"]
    run.mkdir(exist_ok=True)
    job_connection.HeartbeatWriter = partial(HeartbeatWriter, run / f"heartbeat-{rank}")  # type: ignore[misc,assignment]
    torch.compile = partial(torch.compile, backend="eager")  # type: ignore[assignment]  # fast; its graphs are the same
    ddp = make_manager(
        replace(config, dist=replace(config.dist, train_timeout_s=TIMEOUT_S, same_code=False))
    )
    ddp.setup()
    try:
        TrainingRun(
            RunRequest("test", config, run, False, ("test",)), Uneven, ddp, Progress()
        ).train()
    finally:
        ddp.cleanup()


def train_in_all_ways(runs: Path) -> None:
    """One after the other in one process: to load torch's compiler takes longer than all of
    them."""
    train_here(SHORT, Probed, runs / "eager")
    compiled = replace(SHORT, train=replace(SHORT.train, step="compile"))
    train_here(compiled, Probed, runs / "compile")

    import torch._dynamo
    import torch._inductor.config as inductor
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    usual = torch.compile
    only_forward = aot_autograd(
        fw_compiler=lambda graph, _: graph.forward, bw_compiler=refuse_to_compile
    )
    torch.compile = partial(usual, backend=only_forward)  # type: ignore[assignment]
    train_here(compiled, Probed, runs / "only forward")
    torch.compile = usual

    torch._dynamo.reset()
    inductor.cpp.cxx = ("no-such-compiler",)
    inductor.force_disable_caches = True
    train_here(compiled, Probed, runs / "without a compiler")
    torch._dynamo.reset()
    train_unevenly(replace(compiled, train=replace(compiled.train, epochs=3)), runs / "uneven")


def fork_two_ranks(runs: Path) -> None:
    """From a process that has the compiler loaded. What it could do to be fast takes seconds of its
    own, and is left out: instructions for vectors, patterns of slow operations."""
    import torch._dynamo.repro.after_dynamo
    import torch._inductor.compile_fx  # noqa: F401
    import torch._inductor.config as inductor
    from torch._inductor.codecache import torch_key

    torch_key()
    inductor.cpp.simdlen = 1
    inductor.use_joint_graph_passes = False
    run_ranks(
        2, train_in_all_ways, runs, timeout_s=340, context=multiprocessing.get_context("fork")
    )


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [
        event for event in read_events(run / "events" / "rank-00000.jsonl") if event["kind"] == kind
    ]


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in events(run, "train")]


@pytest.mark.soak
def test_on_two_ranks(tmp_path: Path) -> None:
    """One test: all that it looks at is trained at once, and tests of a module may run in several
    workers."""
    run_ranks(1, fork_two_ranks, tmp_path, timeout_s=350)
    is_the_same_training_with_a_compiler_and_without(tmp_path)
    a_backward_pass_that_cannot_be_compiled_falls_back_too(tmp_path)
    ranks_wait_for_one_that_compiles_outside_of_collectives_and_hear_what_it_made(tmp_path)


def is_the_same_training_with_a_compiler_and_without(runs: Path) -> None:
    """And what is only measured is trained in none of them: it does not decay."""
    eager = losses(runs / "eager")
    assert len(eager) == 3
    assert losses(runs / "compile") == pytest.approx(eager, rel=1e-9)
    torch.testing.assert_close(
        *(newest(runs / step).tensors["model"] for step in ("compile", "eager"))
    )
    assert not events(runs / "compile", "warning")
    [warning] = events(runs / "without a compiler", "warning")
    assert warning["message"].startswith(
        "steps are not compiled but run operation by operation, because torch.compile failed: "
    )
    assert "compiler" in warning["message"]
    assert losses(runs / "without a compiler") == eager


def a_backward_pass_that_cannot_be_compiled_falls_back_too(runs: Path) -> None:
    [warning] = events(runs / "only forward", "warning")
    assert "because torch.compile failed: " in warning["message"]
    assert "no compiler knows this backward pass" in warning["message"]
    assert losses(runs / "only forward") == losses(runs / "eager")


def ranks_wait_for_one_that_compiles_outside_of_collectives_and_hear_what_it_made(
    runs: Path,
) -> None:
    spent = []
    for rank in range(2):
        heartbeat = read_heartbeat(runs / "uneven" / f"heartbeat-{rank}")
        assert heartbeat is not None
        spent.append(heartbeat.spent_s)
    assert spent[1][Phase.COMPILE] >= SLOW_S
    assert (
        spent[0][Phase.COMPILED]
        >= TIMEOUT_S
        > max(spent[0][phase] for phase in (Phase.FORWARD, Phase.BACKWARD))
    )
    [different, *again] = [event["message"] for event in events(runs / "uneven", "warning")]
    assert different.startswith(
        "ranks differ in what torch.compile made of Uneven.loss(): rank 0 ("
    )
    assert ": 1 graph, 0 graph breaks, " in different
    assert "2 graphs, 2 graph breaks, " in different.partition("; rank 1 (")[2]
    assert len(again) == 2
    assert again[0].startswith("torch compiled Uneven.loss() again at step 8 on rank 0: ")
    assert "loss (test_compiled_step.py:" in again[1]
    assert " again at step 8 on rank 1: " in again[1]
    assert all(
        "scale" in message and "Try: keep what changes from step to step in a tensor" in message
        for message in again
    )

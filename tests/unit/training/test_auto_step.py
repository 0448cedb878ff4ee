"""`--train.step auto`: every kind of step is tried in the run, and the fastest is kept and
reported."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.optim import Adam

from drumline.base.errors import TrialError, UsageError
from drumline.config.schema import Config, DataConfig, DistConfig, LogConfig, TrainConfig
from drumline.data.loader import Step
from drumline.data.sharding import Cursor, Sharding, plan_step
from drumline.training.job.job import choose_step_kind, flat
from drumline.training.job.optimizer import group_settings
from drumline.training.resume import changed_settings
from drumline.training.run_context import RunRequest
from drumline.training.steps import choice
from drumline.training.steps.choice import (
    TIMED_STEPS,
    WARM_UP_STEPS,
    AutoStep,
    StepOptions,
    TrialFile,
    find_unsafe,
    make_step,
)
from drumline.training.steps.graph import GraphStep
from drumline.training.tasks.hook import Hook
from drumline.training.tasks.ready_hooks import EMA, Unfreeze

CPU_JOB: Any = SimpleNamespace(
    ddp=SimpleNamespace(device=torch.device("cpu")),
    optimizer=SimpleNamespace(param_groups=[]),
    group_settings=[],
)
PLAN = plan_step(Cursor(), length=64, sharding=Sharding(batch_size=8, rank=0, world_size=1))


class Way:
    """A step that takes a while."""

    def __init__(self, name: str, seconds: float, taken: list[str]) -> None:
        self._name = name
        self._seconds = seconds
        self._taken = taken

    def __call__(self, step: Step) -> None:
        self._taken.append(self._name)
        time.sleep(self._seconds)


def test_each_way_is_tried_in_turn_and_the_fastest_is_kept() -> None:
    taken: list[str] = []
    chosen: list[str] = []
    notes: list[str] = []
    # far apart: the machine may be crowded
    seconds = {"slow": 4e-2, "fast": 2e-4, "middling": 2e-2}
    auto = AutoStep(
        {name: lambda name=name: Way(name, seconds[name], taken) for name in seconds},  # type: ignore[misc]
        CPU_JOB,
        StepOptions(on_choice=chosen.append, note=notes.append),
    )
    each = WARM_UP_STEPS + TIMED_STEPS
    for _ in range(3 * each + 5):
        auto(Step(PLAN, iter(())))

    assert taken == ["slow"] * each + ["fast"] * each + ["middling"] * each + ["fast"] * 5
    assert chosen == ["fast"]
    [sentence] = notes
    assert sentence.startswith(
        "steps run as fast, the fastest here; time per step relative to it: slow "
    )
    assert "fast 1.00" in sentence


def test_what_happens_between_steps_says_nothing_about_a_way() -> None:
    """An evaluation, say, that falls into the trial of the fastest."""
    taken: list[str] = []
    chosen: list[str] = []
    seconds = {"fast": 1e-4, "slow": 2e-2}
    auto = AutoStep(
        {name: lambda name=name: Way(name, seconds[name], taken) for name in seconds},  # type: ignore[misc]
        CPU_JOB,
        StepOptions(on_choice=chosen.append),
    )
    for number in range(2 * (WARM_UP_STEPS + TIMED_STEPS)):
        auto(Step(PLAN, iter(())))
        if number == WARM_UP_STEPS + 3:
            time.sleep(0.1)
    assert chosen == ["fast"]


def kinds_tried(
    *, num_steps: int, is_full: bool, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], str]:
    """On this device each step takes a tenth of a second on average, as far as anybody measures."""
    monkeypatch.setattr(choice, "_seconds_between", lambda begin, end: 0.1)
    monkeypatch.setattr(choice, "_is_memory_used", lambda device: is_full)
    taken: list[str] = []
    notes: list[str] = []
    auto = AutoStep(
        {
            name: lambda name=name: Way(name, 0.0, taken)  # type: ignore[misc]
            for name in ("eager", "compile", "graph", "compiled_graph")
        },
        CPU_JOB,
        StepOptions(num_steps=num_steps, note=notes.append),
    )
    while not notes:
        auto(Step(PLAN, iter(())))
    return list(dict.fromkeys(taken)), notes[0].partition("eager 1.00")[2]


def test_what_would_cost_more_than_it_gains_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    every = ["eager", "compile", "graph", "compiled_graph"]
    assert kinds_tried(num_steps=3100, is_full=False, monkeypatch=monkeypatch)[0] == every
    assert kinds_tried(num_steps=sys.maxsize, is_full=False, monkeypatch=monkeypatch)[0] == every
    assert kinds_tried(num_steps=2500, is_full=False, monkeypatch=monkeypatch) == (
        ["eager", "graph"],
        ", graph 1.00; not tried: compile, compiled_graph (the run takes 4 min 10 s)",
    )
    assert kinds_tried(num_steps=3100, is_full=True, monkeypatch=monkeypatch) == (
        ["eager", "compile"],
        ", compile 1.00; not tried: graph, compiled_graph (too little memory is left for graphs)",
    )
    assert kinds_tried(num_steps=2500, is_full=True, monkeypatch=monkeypatch)[0] == ["eager"]


CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


def chosen(
    device: torch.device, *, began_with: Any = "new", log: LogConfig | None = None, **train: Any
) -> str:
    """The kind of step of a new run, or of one that began with this setting."""
    saved = None if began_with == "new" else {"config": {"train.step": began_with}}
    return choose_step_kind(
        Config(train=TrainConfig(**train), log=log or LogConfig()), device, saved
    )


def test_the_default_is_auto_on_a_gpu_where_bits_need_not_repeat_and_eager_elsewhere() -> None:
    assert (chosen(CPU), chosen(CUDA)) == ("eager", "auto")
    assert chosen(CUDA, deterministic=True) == chosen(CUDA, exact="elastic") == "eager"
    assert chosen(CUDA, log=LogConfig(trace=True)) == "eager"
    assert (
        choose_step_kind(
            Config(data=DataConfig(balance="auto")), CUDA, {"config": {"train.step": "graph"}}
        )
        == "eager"
    )
    for step in ("eager", "compile", "graph", "auto"):
        assert chosen(CUDA, step=step, began_with="graph") == chosen(CPU, step=step) == step


def test_a_run_continues_as_it_began() -> None:
    """Also one of a version whose default was eager everywhere, or had no such setting."""
    assert chosen(CUDA, began_with=None) == chosen(CUDA, began_with="auto") == "auto"
    assert chosen(CUDA, began_with="eager") == "eager"
    assert chosen(CUDA, began_with="compiled_graph") == "compiled_graph"
    assert choose_step_kind(Config(), CUDA, {"config": {}}) == "eager"
    # Without the GPU that it began on.
    assert chosen(CPU, began_with="compiled_graph") == chosen(CPU, began_with=None) == "eager"
    assert chosen(CPU, began_with="compile") == "compile"


def test_the_default_is_no_change_of_settings_whatever_the_run_began_with() -> None:
    def changes(
        old: str | None, new: str | None, choice: str | None = None
    ) -> dict[str, tuple[Any, Any]]:
        before = {
            "task": "mine",
            "config": flat(Config(train=TrainConfig(step=old))),
            "step": choice,
        }
        return changed_settings(
            before, RunRequest("mine", Config(train=TrainConfig(step=new)), Path(), False, ())
        )

    assert (
        changes("graph", None)
        == changes(None, None)
        == changes(None, "eager")
        == changes(None, "graph", "graph")
        == {}
    )
    assert changes("graph", "eager") == {"train.step": ("graph", "eager")}
    assert changes(None, "eager", "graph") == {"train.step": ("graph", "eager")}
    # On a GPU the default is auto, and its choice is recorded.
    assert changes(None, "auto", "graph") == {}
    assert changes(None, "auto") == {"train.step": ("eager", "auto")}
    assert changes("graph", "auto") == {"train.step": ("graph", "auto")}


class Record:
    """As `TrialFile`, in memory."""

    def __init__(self, *failed: str) -> None:
        self.failed = list(failed)
        self.written = list[str]()

    def write(self, trying: str = "") -> None:
        self.written.append(trying)


def auto_on_gpu(
    monkeypatch: pytest.MonkeyPatch,
    *,
    fastest: str = "eager",
    record: Record | None = None,
    **settings: Any,
) -> tuple[list[tuple[str, bool]], list[str], Any]:
    """A run with `auto` on a GPU that there is not: the kinds that it took, each with whether the
    optimizer could be captured; its notes; and the optimizer."""
    optimizer = Adam([torch.nn.Parameter(torch.ones(2))], lr=0.5)
    taken = list[str]()
    notes = list[str]()
    (group,) = optimizer.param_groups
    trials: dict[tuple[str, bool], None] = {}

    class Kind(Way):
        def __init__(self, name: str) -> None:
            super().__init__(name, 0.0, taken)

        def __call__(self, step: Step) -> None:
            super().__call__(step)
            trials[self._name, group["capturable"]] = None
            assert isinstance(group["lr"], Tensor) == group["capturable"]

    def capture(inner: Kind, job: Any) -> Kind:
        GraphStep(inner, job)
        return Kind({"eager": "graph", "compile": "compiled_graph"}[inner._name])

    monkeypatch.setattr(choice, "TrainStep", lambda *_, **__: Kind("eager"))
    monkeypatch.setattr(choice, "compiled_step", lambda *_, **__: Kind("compile"))
    monkeypatch.setattr(choice, "GraphStep", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(choice, "_time_point", lambda device: 0.0)
    monkeypatch.setattr(choice, "_is_memory_used", lambda device: False)
    monkeypatch.setattr(choice, "_seconds_between", lambda *_: 0.1 if taken[-1] == fastest else 0.2)
    job: Any = SimpleNamespace(
        ddp=SimpleNamespace(device=torch.device("cuda", 0)),
        step_kind="auto",
        optimizer=optimizer,
        model=torch.nn.Identity(),
        applied=None,
        sharded=None,
        heartbeat=None,
        group_settings=group_settings(optimizer),
    )
    record = record or Record()
    options = StepOptions(
        failed=record.failed, on_trial=record.write, note=notes.append, **settings
    )
    step = make_step(job, Config(), options)
    if isinstance(step, AutoStep):
        step._device = CPU
    for _ in range(5 * (WARM_UP_STEPS + TIMED_STEPS)):
        step(Step(PLAN, iter(())))
    return list(trials), notes, group


def test_only_captured_steps_have_an_optimizer_that_can_be_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = [("eager", False), ("compile", False)]
    all_kinds = [("graph", True), ("compiled_graph", True)]
    for fastest in ("eager", "compile"):
        trials, _, group = auto_on_gpu(monkeypatch, fastest=fastest)
        assert trials == plain + all_kinds
        assert (group["capturable"], group["lr"]) == (False, 0.5), "plain again after the choice"
    for fastest in ("graph", "compiled_graph"):
        trials, _, group = auto_on_gpu(monkeypatch, fastest=fastest)
        assert trials == plain + all_kinds
        assert group["capturable"], "its graph has been captured with this state"
        # So has a run that is resumed with the choice.
        assert auto_on_gpu(monkeypatch, chosen=fastest)[0] == [(fastest, True)]
    assert auto_on_gpu(monkeypatch, chosen="eager")[0] == [("eager", False)]
    assert auto_on_gpu(monkeypatch, is_default=True, num_steps=200)[0] == [("eager", False)]
    assert auto_on_gpu(monkeypatch, uncaptured="a hook")[0] == plain


def test_a_kind_is_recorded_before_it_is_tried_and_left_out_after_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = Record()
    auto_on_gpu(monkeypatch, record=record)
    assert record.written == ["compile", "graph", "compiled_graph", ""]
    for failed, expected in (
        ("compile", ["eager", "graph"]),
        ("graph", ["eager", "compile"]),
        ("compiled_graph", ["eager", "compile", "graph"]),
    ):
        trials, notes, _ = auto_on_gpu(monkeypatch, record=Record(failed))
        assert [name for name, _ in trials] == expected
        reason = f"{failed} steps are not tried: the run failed at an earlier start while it tried them ("
        assert notes[0].startswith(reason)
    assert auto_on_gpu(monkeypatch, record=Record("compile", "graph"))[0] == [("eager", False)]
    # Only a trial is left out.
    assert auto_on_gpu(monkeypatch, record=Record("graph"), chosen="graph")[0] == [("graph", True)]


class TooLarge(Way):
    def __call__(self, step: Step) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total of 1 GiB"
        )


def test_out_of_memory_in_a_trial_names_the_kind_and_can_be_started_again() -> None:
    taken: list[str] = []
    kinds: dict[str, Callable[[], Way]] = {
        "eager": lambda: Way("eager", 0.0, taken),
        "compile": lambda: TooLarge("compile", 0.0, taken),
    }
    auto = AutoStep(kinds, CPU_JOB, StepOptions())
    for _ in range(WARM_UP_STEPS + TIMED_STEPS):
        auto(Step(PLAN, iter(())))
    with pytest.raises(TrialError) as caught:
        auto(Step(PLAN, iter(())))
    assert str(caught.value) == (
        "out of memory while --train.step auto tried compile: CUDA out of memory. Tried to allocate 2.00 GiB\n"
        "  try: rerun the same command to resume: it does not try it again"
    )
    first = AutoStep({"eager": kinds["compile"]}, CPU_JOB, StepOptions())
    with pytest.raises(torch.OutOfMemoryError):
        first(Step(PLAN, iter(())))


def test_compressed_gradients_are_captured_if_asked_and_powersgd_and_replicas_never() -> None:
    config = Config(dist=DistConfig(comm="powersgd"))
    several = SimpleNamespace(comm=object())
    job = SimpleNamespace(comm=None)
    reason = find_unsafe(several, config, [], is_default=False)  # type: ignore[arg-type]
    assert reason == "PowerSGD waits for the device in every step (--dist.comm powersgd)"
    assert find_unsafe(job, config, [], is_default=False) is None  # type: ignore[arg-type]
    rounded = Config(dist=DistConfig(comm="bf16"))
    reason = find_unsafe(several, rounded, [], is_default=True)  # type: ignore[arg-type]
    assert reason == "gradients go through a hook (--dist.comm bf16)"
    assert find_unsafe(several, rounded, [], is_default=False) is None  # type: ignore[arg-type]
    alone = Config(dist=DistConfig(sync="local:8"))
    reason = find_unsafe(SimpleNamespace(sync=object()), alone, [], is_default=False)  # type: ignore[arg-type]
    assert reason == "replicas synchronize between steps (--dist.sync)"


def test_what_unfreezes_parameters_is_not_captured_by_auto_nor_if_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reason = find_unsafe(None, Config(), [EMA(0.9), Unfreeze("0.", at_step=4)], is_default=False)  # type: ignore[arg-type]
    assert reason == "the hook Unfreeze may change what a step computes"
    assert find_unsafe(None, Config(), [Hook()], is_default=False) is None  # type: ignore[arg-type]
    _, notes, _ = auto_on_gpu(monkeypatch, uncaptured=reason)
    assert notes[0] == f"captured steps are left out: {reason}"
    job: Any = SimpleNamespace(ddp=SimpleNamespace(device=CUDA), step_kind="graph")
    with pytest.raises(UsageError) as caught:
        make_step(job, Config(), StepOptions(uncaptured=reason))
    assert str(caught.value) == (
        f"--train.step graph cannot capture the steps of this run: {reason}\n  try: choose one of eager, compile"
    )


@pytest.mark.parametrize(
    ("error", "failed"),
    [(None, []), (KeyboardInterrupt(), []), (RuntimeError("lost a rank"), ["graph"])],
    ids=["finished or preempted", "interrupted", "failed"],
)
def test_a_trial_in_which_the_run_ended_without_an_error_is_made_again(
    tmp_path: Path, error: BaseException | None, failed: list[str]
) -> None:
    path = tmp_path / "trial"
    ddp = cast(Any, SimpleNamespace(is_main_process=lambda: True, device=CPU))
    with suppress(BaseException), TrialFile(path, ddp) as trials:
        trials.write("graph")
        if error is not None:
            raise error
    assert TrialFile(path, ddp).failed == failed
    path.write_bytes(b"eager \xff")
    assert TrialFile(path, ddp).failed == []

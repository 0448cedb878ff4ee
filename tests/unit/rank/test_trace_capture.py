"""What a profile of some ranks leaves on rank 0, and in a script. Ranks are threads here."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from drumline.base.errors import TrainingError
from drumline.base.rank_environment import Topology
from drumline.parallel.scripts.torch_hooks import ScriptProfile
from drumline.rank.profiled import trace_capture
from drumline.rank.profiled.slow_modes import ANOMALY, ANOMALY_CALLS, TRACER
from drumline.rank.profiled.trace_capture import TraceCapture, unused_gradients
from drumline.runs.profile_files import (
    FIRST_WITH_COST,
    JobFacts,
    RankFacts,
    StackSamples,
    facts_path,
    trace_path,
    where_to_look,
)
from drumline.training.between_steps.step_profiler import ProfiledStep

CPU = torch.device("cpu")


def make_capture(folder: Path, rank: int = 0) -> TraceCapture:
    topology = Topology(rank=rank, world_size=2)
    return TraceCapture(range(2, 3), folder, topology, JobFacts(task="train.py"))


def facts_without_observation(capture: TraceCapture) -> RankFacts:
    """Those of a capture whose profiled steps were not taken."""
    nothing = SimpleNamespace(
        stacks=StackSamples(), syncs=SimpleNamespace(lines=[]), cpu=None, workers=None, process=None
    )
    capture._observation = cast(Any, nothing)
    return capture._facts()


class ThreadRanks:
    """Two threads that gather as ranks do; a rank that does not come breaks the barrier."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._own = threading.local()
        self._values = [None, None]
        self._barrier = threading.Barrier(2, timeout=5)
        monkeypatch.setattr(trace_capture, "gather_json", self._gather)
        monkeypatch.setattr(trace_capture, "gather_on_main", self._gather_on_main)

    def collect(self, folders: Sequence[Path], contents: Sequence[bytes | None]) -> None:
        """Each rank writes its files, unless it cannot."""
        with ThreadPoolExecutor(2) as pool:
            for done in [
                pool.submit(self._collect, rank, folders[rank], contents[rank]) for rank in (0, 1)
            ]:
                done.result()

    def _collect(self, rank: int, folder: Path, content: bytes | None) -> None:
        self._own.rank = rank
        capture = make_capture(folder, rank)
        if content is not None:
            for path in (trace_path(folder, rank), facts_path(folder, rank)):
                path.write_bytes(content)
            capture._is_written = True
        capture.collect()

    def _gather(self, value: Any) -> list[Any]:
        self._values[self._own.rank] = value
        self._barrier.wait()
        values = [list(value) if isinstance(value, tuple) else value for value in self._values]
        self._barrier.wait()
        return values

    def _gather_on_main(self, content: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        contents = self._gather(content)
        return contents if self._own.rank == 0 else []


def test_a_second_profile_replaces_the_first_ones_traces_on_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / "node0", tmp_path / "node1"]
    for folder in folders:
        folder.mkdir()
    ranks = ThreadRanks(monkeypatch)
    for content in (b"first", b"other"):
        ranks.collect(folders, [content, content])
        assert (
            trace_path(folders[0], 1).read_bytes()
            == facts_path(folders[0], 1).read_bytes()
            == content
        )
    ranks.collect(folders, [b"third", None])
    assert trace_path(folders[0], 0).read_bytes() == b"third"
    assert not trace_path(folders[0], 1).exists(), (
        "rank 1 could not write: its earlier trace is of another start"
    )
    assert not facts_path(folders[0], 1).exists()


def test_in_a_shared_folder_no_file_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = ThreadRanks(monkeypatch)
    monkeypatch.setattr(
        trace_capture, "replace_bytes", lambda *args: pytest.fail("a file was sent")
    )
    ranks.collect([tmp_path, tmp_path], [b"zero", b"one"])
    assert trace_path(tmp_path, 1).read_bytes() == b"one"


class FullDisk:
    """A capture that cannot write."""

    is_done = is_recording = False
    num_collected = 0

    def __init__(self) -> None:
        self.modules: list[Any] = []
        self.optimizers: list[Any] = []

    def begin_step(self, number: int) -> None:
        self.finish()

    def finish(self) -> None:
        self.is_done = True
        raise OSError(28, "No space left on device")

    def collect(self) -> None:
        self.num_collected += 1

    def stop_late(self) -> bool:
        return True


def take_step(
    profile: ScriptProfile, optimizer: torch.optim.Optimizer, closure: Any = None
) -> None:
    """`closure`: the step calls it, as it may call that of another optimizer."""
    hooks = [
        register_optimizer_step_pre_hook(profile._before_step),
        register_optimizer_step_post_hook(profile._after_step),
    ]
    try:
        optimizer.step(closure)
    finally:
        for hook in hooks:
            hook.remove()


def test_a_rank_of_a_script_that_cannot_write_still_joins_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_backend", lambda: "gloo")
    profile = ScriptProfile("2:3", tmp_path, ends_script=False, script="train.py")
    capture = FullDisk()
    removed = []
    profile._capture = capture
    profile._hooks = [SimpleNamespace(remove=lambda: removed.append(True))]
    take_step(profile, sgd([torch.zeros(1)]))
    assert capture.num_collected == 1
    assert removed == [True]
    assert "rank 0 could not write its trace" in "".join(capsys.readouterr())


def test_the_optimizers_of_a_script_are_counted(tmp_path: Path) -> None:
    profile = ScriptProfile("9:10", tmp_path, ends_script=False, script="gan.py")
    capture = make_capture(tmp_path)
    capture._steps = range(9, 10)
    profile._capture = capture
    discriminator, generator = (
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1) for _ in range(2)
    )
    for _ in range(2):
        take_step(profile, discriminator)
    assert (capture._number, capture.num_optimizers) == (2, 1)
    for optimizer in (generator, discriminator):
        take_step(profile, optimizer)
    assert (capture._number, capture.num_optimizers) == (3, 2)


def test_an_optimizer_inside_another_one_is_no_second_one(tmp_path: Path) -> None:
    """ZeroRedundancyOptimizer has one for its part of the parameters, or for none of them."""
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    outer = torch.optim.SGD(parameters, lr=0.1)
    empty = sgd(parameters[:1])
    empty.param_groups[0]["params"] = []
    for inner in (sgd(parameters[:1]), empty):
        profile = ScriptProfile("9:10", tmp_path, ends_script=False, script="zero.py")
        profile._capture = make_capture(tmp_path)
        profile._capture._steps = range(9, 10)
        for _ in range(2):
            take_step(profile, outer, inner.step)
        assert (profile._capture._number, profile._capture.num_optimizers) == (2, 1)
        assert set(profile._optimizers) == {inner, outer}


def test_steps_after_one_that_failed_are_counted(tmp_path: Path) -> None:
    """As a script does that catches an OOM, and goes on with the next batch."""
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    failing = sgd(parameters)
    profile = ScriptProfile("9:10", tmp_path, ends_script=False, script="train.py")
    profile._capture = make_capture(tmp_path)
    profile._capture._steps = range(9, 10)
    profile._makes_optimizers = True
    take_step(profile, failing)

    def run_out_of_memory() -> None:
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        take_step(profile, failing, run_out_of_memory)
    take_step(profile, failing)
    assert profile._capture._number == 2


def test_steps_after_the_last_one_of_an_optimizer_failed_are_counted(tmp_path: Path) -> None:
    """As a script does that makes a new optimizer after an OOM."""
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    profile = ScriptProfile("9:10", tmp_path, ends_script=False, script="train.py")
    profile._capture = make_capture(tmp_path)
    profile._capture._steps = range(9, 10)

    def run_out_of_memory() -> None:
        raise torch.OutOfMemoryError

    abandoned = sgd(parameters)
    take_step(profile, abandoned)
    with pytest.raises(torch.OutOfMemoryError):
        take_step(profile, abandoned, run_out_of_memory)
    successor = sgd(parameters)
    for _ in range(2):
        take_step(profile, successor, sgd(parameters).step)
    assert profile._capture._number == 3


def test_a_step_that_runs_backward_passes_is_counted_once(tmp_path: Path) -> None:
    """As of LBFGS."""
    profile = ScriptProfile("9:10", tmp_path, ends_script=False, script="train.py")
    profile._capture = make_capture(tmp_path)
    profile._capture._steps = range(9, 10)
    profile._makes_optimizers = True
    optimizer = sgd([torch.nn.Parameter(torch.zeros(1))])
    for _ in range(2):
        take_step(profile, optimizer, lambda: profile._run_backward(lambda: None))
    assert profile._capture._number == 2


def test_a_step_that_calls_the_one_of_its_base_class_is_counted_once(tmp_path: Path) -> None:
    class Clipped(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    profile = ScriptProfile("9:10", tmp_path, ends_script=False, script="train.py")
    profile._capture = make_capture(tmp_path)
    profile._capture._steps = range(9, 10)
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    sgd(parameters)  # from here on torch calls its hooks in SGD.step, too
    clipped = Clipped(parameters, lr=0.1)
    for _ in range(2):
        take_step(profile, clipped)
    assert profile._capture._number == 2


def test_an_optimizer_that_is_made_again_takes_the_steps_of_the_first(tmp_path: Path) -> None:
    """As in each epoch."""
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    profile = ScriptProfile("9:10", tmp_path, ends_script=False, script="epochs.py")
    profile._capture = make_capture(tmp_path)
    profile._capture._steps = range(9, 10)
    for _ in range(3):
        take_step(profile, sgd(parameters))
    assert (profile._capture._number, profile._capture.num_optimizers) == (3, 1)


def test_without_an_optimizer_of_torch_a_backward_pass_is_a_step(tmp_path: Path) -> None:
    profile = ScriptProfile("9:10", tmp_path, ends_script=False, script="paper.py")
    profile._capture = make_capture(tmp_path)
    profile._capture._steps = range(9, 10)
    calls: list[str] = []
    for _ in range(3):
        profile._run_backward(calls.append, "backward")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(profile._run_backward, calls.append, "of another thread").result()
    assert (profile._capture._number, len(calls)) == (3, 4)
    profile._make_optimizer(calls.append, "SGD")
    profile._run_backward(calls.append, "backward")
    assert profile._num_steps == 3, "the optimizer has not taken a step"


@pytest.mark.parametrize(
    ("num_steps", "makes_optimizers", "message"),
    [
        (
            4,
            True,
            "drumline: nothing was profiled: train.py ended after 4 steps of rank 0, before step 10\n"
            "  try: let it take 20 steps, or profile earlier ones (drumline launch --profile 2:4)\n",
        ),
        (
            0,
            True,
            "drumline: nothing was profiled: train.py ended after 0 steps of rank 0, which are counted by step() of a "
            "torch.optim optimizer\n"
            "  try: call the optimizer's step(), and not a function of its own\n",
        ),
        (
            0,
            False,
            "drumline: nothing was profiled: train.py ended after 0 steps of rank 0, which are counted by step() of a "
            "torch.optim optimizer and Tensor.backward()\n"
            "  try: call loss.backward() on the main thread; if this script starts the one that trains, profile that "
            "one\n",
        ),
    ],
)
def test_a_script_without_a_profiled_step_says_what_was_looked_for(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    num_steps: int,
    makes_optimizers: bool,
    message: str,
) -> None:
    profile = ScriptProfile("10:20", tmp_path, ends_script=True, script="train.py")
    profile._capture = make_capture(tmp_path)
    profile._num_steps = num_steps
    profile._makes_optimizers = makes_optimizers
    with pytest.raises(SystemExit), profile:
        sys.exit(0)
    assert capsys.readouterr().err == message
    for failure in (ValueError("of the script"), SystemExit("usage"), SystemExit(1)):
        with pytest.raises(type(failure)), profile:
            raise failure
    assert capsys.readouterr().err == "", "the script has failed"
    profile._capture.is_recording = True
    with profile:
        pass
    assert capsys.readouterr().err == "", "it ends, and writes what it has"


def sgd(parameters: Iterable[Tensor], lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr)


def test_gradients_of_weights_that_no_optimizer_updates_are_unused() -> None:
    head = torch.nn.Linear(2, 2, bias=False)
    frozen = torch.nn.Linear(2, 6, bias=False)
    model = torch.nn.ModuleList([head, frozen])
    without_rate = sgd(model.parameters())
    without_rate.param_groups[0]["params"].pop()
    without_rate.add_param_group({"params": frozen.parameters(), "lr": 0.0})
    for optimizer in (sgd(head.parameters()), without_rate):
        assert unused_gradients([model], [optimizer]) == 0.75
    frozen.requires_grad_(False)
    assert unused_gradients([model], [sgd(head.parameters())]) == 0.0


def test_gradients_that_may_have_a_use_are_not_called_unused() -> None:
    first = torch.nn.Linear(2, 2)
    second = torch.nn.Linear(2, 2)
    model = torch.nn.ModuleList([first, second])
    parts = [sgd(first.parameters()), sgd(second.parameters())]
    assert unused_gradients([model], parts) == 0.0
    assert unused_gradients([first, second], parts[:1]) == 0.0, "a teacher, or one model of a GAN"
    assert unused_gradients([model], [sgd(model.parameters(), lr=0.0)]) == 0.0, "a warmup begins"
    model.find_unused_parameters = True  # type: ignore[assignment]
    assert unused_gradients([model], parts[:1]) == 0.0


def test_a_rank_of_a_run_that_cannot_write_joins_the_others_before_it_fails(tmp_path: Path) -> None:
    step = ProfiledStep.__new__(ProfiledStep)
    capture = FullDisk()
    context = SimpleNamespace(job=SimpleNamespace(ddp=SimpleNamespace(device=CPU)))
    step._folder = tmp_path
    step._capture, step._context = cast(Any, capture), cast(Any, context)
    with pytest.raises(TrainingError, match="No space left"):
        step.finish()
    assert capture.num_collected == 1


def test_a_run_that_ends_before_the_profiled_steps_names_the_first(tmp_path: Path) -> None:
    step = ProfiledStep.__new__(ProfiledStep)
    warned = []
    context = SimpleNamespace(
        job=SimpleNamespace(ddp=SimpleNamespace(device=CPU)), warn=warned.append
    )
    step._folder = tmp_path
    step._steps = range(10, 20)
    step._capture, step._context = make_capture(tmp_path), cast(Any, context)
    step.finish()
    assert warned == ["nothing was profiled: the run ended before step 10 of this start"]


def test_the_backend_is_the_one_at_the_first_profiled_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = make_capture(tmp_path)
    capture._profiler = SimpleNamespace(start_trace=lambda: None)
    monkeypatch.setattr("torch.distributed.get_backend", lambda: "gloo")
    with monkeypatch.context() as patch:
        patch.setattr("torch.distributed.is_initialized", lambda: True)
        capture.begin_step(2)
    capture._range.__exit__(None, None, None)
    capture._observation.stop()
    capture._number += 1
    assert capture._facts().backend == "gloo"


@pytest.fixture
def open_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective of gloo that does not end."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_backend", lambda: "gloo")
    monkeypatch.setattr(trace_capture, "uses_gloo", lambda: True)
    monkeypatch.setattr(trace_capture, "has_open_collectives", lambda: True)
    monkeypatch.setattr(trace_capture, "MOST_OPEN_S", 0.01)
    monkeypatch.setattr(trace_capture, "UNSTOPPED", [])


@pytest.mark.parametrize("at_end", [False, True])
def test_a_rank_whose_collective_does_not_end_stops_after_the_same_step_without_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], open_collective: None, at_end: bool
) -> None:
    capture = make_capture(tmp_path, rank=1)
    profiler = SimpleNamespace(
        start_trace=lambda: None, stop_trace=lambda: pytest.fail("its memory was freed")
    )
    capture._profiler = profiler
    capture.begin_step(2)
    if at_end:
        capture.finish()
    else:
        capture.begin_step(3)
    assert capture.is_done
    assert not capture.is_recording
    assert [profiler] == trace_capture.UNSTOPPED
    assert not list(tmp_path.iterdir())
    message = " ".join(capsys.readouterr().err.split())
    assert "rank 1 has no trace: a collective was still open" in message


def test_a_profiler_is_stopped_later_when_no_collective_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_collective: None
) -> None:
    capture = make_capture(tmp_path)
    stopped = []
    capture._profiler = SimpleNamespace(
        start_trace=lambda: None, stop_trace=lambda: stopped.append(True)
    )
    capture.begin_step(2)
    capture.begin_step(3)
    monkeypatch.setattr(trace_capture, "LATER_S", 0.0)
    capture._next_try_s = 0.0
    assert not capture.stop_late()
    assert not stopped
    monkeypatch.setattr(trace_capture, "has_open_collectives", lambda: False)
    assert capture.stop_late()
    assert stopped == [True]
    assert capture.stop_late()
    assert stopped == [True], "once"


def test_torchs_own_profiler_records_nothing_after_it_was_stopped_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_capture, "UNSTOPPED", [])
    monkeypatch.setattr(trace_capture, "wait_for_collectives", lambda: False)
    # sets a variable
    monkeypatch.setattr(trace_capture, "quiet_profiler", lambda: None)
    capture = make_capture(tmp_path)
    capture.begin_step(2)
    capture.begin_step(3)
    assert torch.autograd._profiler_enabled()
    monkeypatch.setattr(trace_capture, "has_open_collectives", lambda: False)
    capture._next_try_s = 0.0
    assert capture.stop_late()
    assert not torch.autograd._profiler_enabled()


def test_a_script_goes_on_until_the_profiler_is_stopped(tmp_path: Path) -> None:
    profile = ScriptProfile("2:3", tmp_path, ends_script=False, script="train.py")
    capture = FullDisk()
    removed = []
    answers = iter([False, False, True])
    capture.stop_late = lambda: next(answers)  # type: ignore[method-assign]
    profile._capture = capture
    profile._hooks = [SimpleNamespace(remove=lambda: removed.append(True))]
    optimizer = sgd([torch.zeros(1)])
    for _ in range(3):
        assert not removed
        take_step(profile, optimizer)
    assert removed == [True]


def test_without_gloo_nothing_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, open_collective: None
) -> None:
    monkeypatch.setattr(trace_capture, "uses_gloo", lambda: False)
    assert trace_capture.wait_for_collectives()


@pytest.mark.parametrize(
    ("entry", "is_open"),
    [
        ({"profiling_name": "gloo:all_reduce", "is_p2p": False, "retired": False}, True),
        ({"profiling_name": "gloo:all_reduce", "is_p2p": False, "retired": True}, False),
        ({"profiling_name": "nccl:all_reduce", "is_p2p": False, "retired": False}, False),
        ({"profiling_name": "gloo:all_reduce"}, False),
        ({}, False),
    ],
)
def test_what_torch_does_not_record_of_a_collective_counts_as_ended(
    monkeypatch: pytest.MonkeyPatch, entry: dict[str, Any], is_open: bool
) -> None:
    monkeypatch.setattr(trace_capture, "recorded_collectives", lambda: [entry])
    assert trace_capture.has_open_collectives() == is_open


def test_the_last_line_says_how_many_ranks_the_merged_trace_has() -> None:
    assert where_to_look(Path("run"), 64).startswith("the trace of all ranks: run/profile/merged")
    assert where_to_look(Path("run"), 65).startswith(
        "the trace of the first 64 of 65 ranks: run/profile/merged"
    )


def test_half_of_the_steps_before_are_without_what_slows_each_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_capture, "quiet_profiler", lambda: None)
    capture = make_capture(tmp_path)
    capture._steps = range(FIRST_WITH_COST, FIRST_WITH_COST + 1)
    monkeypatch.setattr(capture, "_start", lambda: None)
    now_s = 0.0
    monkeypatch.setattr(capture, "_now", lambda: now_s)
    is_enabled = ANOMALY_CALLS["is_anomaly_enabled"]
    with torch.autograd.set_detect_anomaly(True):
        for number in range(1, FIRST_WITH_COST + 1):
            capture.begin_step(number)
            now_s += 0.02 if is_enabled() else 0.005
        assert not is_enabled()
        capture.finish()
        assert is_enabled()
    facts = facts_without_observation(capture)
    assert facts.unprofiled_step_s == pytest.approx(0.005)
    assert facts.slow_modes_s == pytest.approx(0.015)
    assert facts.slow_modes == (ANOMALY,)


@pytest.mark.parametrize("first", range(2, FIRST_WITH_COST))
def test_a_mode_whose_cost_cannot_be_measured_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    monkeypatch.setattr(trace_capture, "quiet_profiler", lambda: None)
    capture = make_capture(tmp_path)
    capture._steps = range(first, first + 1)
    monkeypatch.setattr(capture, "_start", lambda: None)
    tracer = sys.gettrace()
    sys.settrace(lambda *event: None)
    try:
        with torch.autograd.set_detect_anomaly(True):
            for number in range(1, first + 1):
                capture.begin_step(number)
            capture.finish()
    finally:
        sys.settrace(tracer)
    facts = facts_without_observation(capture)
    assert facts.slow_modes == (ANOMALY, TRACER)
    assert facts.slow_modes_s is None


def test_torchs_profiler_is_quiet_before_it_is_used_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = make_capture(tmp_path)
    calls: list[str] = []
    monkeypatch.setattr(trace_capture, "quiet_profiler", lambda: calls.append("quiet"))
    monkeypatch.setattr(capture._others, "silence", lambda: calls.append("profile"))
    capture._steps = range(FIRST_WITH_COST, FIRST_WITH_COST + 1)
    with torch.autograd.set_detect_anomaly(True):
        for number in range(FIRST_WITH_COST - 1):
            capture.begin_step(number)
        capture.close()
    assert calls == ["quiet", "profile"]


def test_a_capture_that_an_error_ends_in_a_profiled_step_leaves_nothing_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trace_capture, "UNSTOPPED", [])
    monkeypatch.setattr(trace_capture, "quiet_profiler", lambda: None)
    callbacks = list(gc.callbacks)
    capture = make_capture(tmp_path)
    with torch.autograd.set_detect_anomaly(True):
        for number in (1, 2):
            capture.begin_step(number)
        assert capture.is_recording
        capture.close()
        assert torch.is_anomaly_enabled()
        assert gc.callbacks == callbacks
        with monkeypatch.context() as patch:
            patch.setattr(trace_capture, "has_open_collectives", lambda: True)
            refused = make_capture(tmp_path)
            refused.begin_step(1)
            assert refused.is_done
        next_capture = make_capture(tmp_path)
        next_capture.begin_step(1)
        assert not torch.autograd._profiler_enabled()
        next_capture.close()
    assert not list(tmp_path.iterdir())
    assert "rank 0 has no trace: a collective of the nodes before" in capsys.readouterr().err


def test_a_run_that_ends_before_its_profiled_steps_leaves_other_profilers_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_capture, "quiet_profiler", lambda: None)
    capture = make_capture(tmp_path)
    capture.begin_step(1)
    capture.finish()
    with torch.profiler.profile() as users_profiler:
        torch.ones(2).sum()
    assert "aten::sum" in {event.name for event in users_profiler.events() or ()}

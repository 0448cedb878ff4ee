"""Observes or profiles a script by wrapping functions of torch when the script imports it. Wrapped
functions return the same values, and nothing is attached to the script's own objects."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any, Self, cast
from weakref import WeakSet

from drumline.base.rank_environment import Topology, own_variables, topology_from
from drumline.base.text import plural, print_message
from drumline.parallel.scripts.script_recorder import ScriptRecorder
from drumline.watch.heartbeat import BACKWARD, DATA, FORWARD, OPTIMIZER, HeartbeatWriter, Phase


def observe_torch(activity: HeartbeatWriter, recorder: ScriptRecorder) -> None:
    """Begin when the script has imported torch."""
    call_after_torch(_TorchObserver(activity, recorder).begin, "ranks are not compared")


def call_after_torch(loaded: Callable[[], None], without: str) -> None:
    """Call back when the script has imported torch, at once if it has. `without`: what is missing
    if the call fails, for the message."""
    after = _AfterTorch(loaded, without)
    if "torch" in sys.modules:
        after.call_back()
    else:
        sys.meta_path.insert(0, after)


@dataclass(eq=False)
class _AfterTorch(MetaPathFinder):
    """Finds no module; calls back when torch has been loaded."""

    loaded: Callable[[], None]
    without: str
    """What is missing if the call fails."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """The module as it is found without this one, and a call when torch has run."""
        if fullname != "torch" or self not in sys.meta_path:
            return None

        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec

        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            """Run torch's own code, then call back."""
            load(module)
            self.call_back()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def call_back(self) -> None:
        """torch is there; a failure is printed."""
        try:
            self.loaded()
        except Exception as error:
            # A failure of the watchdog must not stop the script.
            print_message(
                f"{self.without}: this version of torch cannot be observed: {type(error).__name__}: {error}"
            )


class _TorchObserver:
    """Records which phase the main thread is in, for finding stragglers, and what ranks compare.

    A phase lasts while a function of torch is called: forward, backward, the next batch of a
    loader, the optimizer's step. Between them the script's own code runs."""

    def __init__(self, activity: HeartbeatWriter, recorder: ScriptRecorder) -> None:
        self._activity = activity
        self._recorder = recorder
        self._main_thread = threading.main_thread().ident
        self._phase = int(Phase.BETWEEN)
        self._num_backward = 0

    def begin(self) -> None:
        """torch is loaded: wrap it."""
        import torch
        from torch.distributed import Work
        from torch.nn.parallel import DistributedDataParallel
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )
        from torch.utils.data import DataLoader

        from drumline.rank.torch_internals import LoaderIterator

        self._is_compiling = torch.compiler.is_compiling
        self._activity.mark(self._phase)
        wrap_method(DistributedDataParallel, "__init__", self._build)
        wrap_method(DistributedDataParallel, "forward", self._timed(FORWARD))
        wrap_method(torch.Tensor, "backward", self._timed(BACKWARD, self._begin_backward))

        # A rank waits for the others here, as in backward.
        wrap_method(Work, "wait", self._timed(BACKWARD))
        wrap_method(DataLoader, "__iter__", self._iterate)
        wrap_method(LoaderIterator, "__next__", self._timed(DATA))
        register_optimizer_step_pre_hook(self._begin_optimizer)
        register_optimizer_step_post_hook(self._end_optimizer)

    def _is_observed(self) -> bool:
        """Whether this call belongs to a step of the script: not one of its other threads, and not
        what the compiler traces."""
        return not self._is_compiling() and threading.get_ident() == self._main_thread

    def _enter(self, phase: int) -> None:
        """The main thread is in this phase from now on."""
        self._phase = phase
        self._activity.mark(phase)

    def _timed(self, phase: int, before: Callable[[], None] = lambda: None) -> Callable[..., Any]:
        """A wrapper for `wrap_method` that marks this phase while a call lasts."""

        def wrapper(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not self._is_observed():
                return call(*args, **kwargs)

            before()
            last = self._phase
            self._enter(phase)

            try:
                return call(*args, **kwargs)
            finally:
                self._enter(last)

        return wrapper

    def _begin_backward(self) -> None:
        """A step begins."""
        # Here and not in forward, which may be compiled.
        self._num_backward += 1
        self._activity.begin_step(self._num_backward)
        with contextlib.suppress(Exception):
            self._recorder.modules.begin_backward()

    def _begin_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """torch calls it before each step of any optimizer."""
        if self._is_observed():
            self._recorder.modules.optimizers.add(optimizer)
            self._enter(OPTIMIZER)

    def _end_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """torch calls it after each step of any optimizer."""
        if self._is_observed():
            self._enter(Phase.BETWEEN)

    def _build(self, call: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> None:
        """The script wraps a model in DDP: its group exists, and its replicas are compared."""
        call(module, *args, **kwargs)
        self._recorder.record_facts()
        with contextlib.suppress(Exception):
            self._recorder.modules.add(module)

    def _iterate(self, call: Callable[..., Any], loader: Any) -> Any:
        """The script begins to iterate over a loader, in the frame above torch's."""
        self._recorder.record_loader(loader, sys._getframe(2))
        return call(loader)


def wrap_method(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a method by one that calls `wrapper(method, *its arguments)`. Its signature stays,
    and so does what torch.compile makes of it."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(method, *args, **kwargs)

    if isinstance(method, FunctionType):
        # torch.compile recognizes torch's own functions, which it does not trace, by their file.
        code = method.__code__
        inner = cast(FunctionType, wrapped)
        inner.__code__ = inner.__code__.replace(
            co_filename=code.co_filename, co_firstlineno=code.co_firstlineno
        )

    setattr(owner, name, wrapped)


def is_inside_step(hooked: FrameType) -> bool:
    """Whether an optimizer's step is called by another one's. `hooked`: the function of torch that
    calls the hooks of a step, and then the step."""
    caller = hooked.f_back
    while caller is not None:
        if caller.f_code is hooked.f_code:
            return True
        caller = caller.f_back

    return False


@dataclass(eq=False)
class ScriptProfile:
    """Counts the steps of a script, and profiles some of them.

    A step ends with a step of the first optimizer that the script uses, or of one that has taken
    its place; without an optimizer of torch, with a backward pass. After the last profiled step
    torch's modes, its hooks and Python's warnings are as they were. Only methods stay wrapped, and do
    what they did."""

    steps: str
    """Which are profiled: `2:4`."""

    folder: Path
    ends_script: bool
    """After the last of them."""

    script: str

    def __post_init__(self) -> None:
        self._topology = topology_from(own_variables()) or Topology()
        self._num_steps = 0
        self._optimizers: WeakSet[Any] = WeakSet()
        """That have taken a step."""

        self._counted: WeakSet[Any] = WeakSet()
        """Those of them whose steps are those of the script."""

        self._outermost: int | None = None
        """The `id` of the optimizer whose step has begun: it may call another one's. None: it has ended."""

        self._first_updated: set[int] = set()
        """The `id` of each parameter that the first one updates."""

        self._updated: set[int] = set()
        """The `id` of each parameter that one of them updates."""

        self._makes_optimizers = False
        """Of torch: their steps are those of the script."""

        self._is_in_backward = False
        self._num_optimizers = 0
        """Those with parameters of their own: one that is inside another one has the same."""

        self._capture: Any = None
        self._hooks: list[Any] = []
        self._has_finished = False
        """The profiled steps are done."""

    def observe(self) -> None:
        """torch is loaded."""
        from torch import Tensor
        from torch.nn.parallel import DistributedDataParallel
        from torch.optim.optimizer import (
            Optimizer,
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        from drumline.config.rules import profiled_steps
        from drumline.rank.profiled.trace_capture import TraceCapture
        from drumline.runs.profile_files import PROFILE_FOLDER, JobFacts

        steps = profiled_steps(self.steps)
        assert steps is not None, self.steps
        self._capture = TraceCapture(
            steps,
            self.folder / PROFILE_FOLDER,
            self._topology,
            JobFacts(task=self.script),
        )

        wrap_method(DistributedDataParallel, "__init__", self._build)
        wrap_method(Optimizer, "__init__", self._make_optimizer)
        wrap_method(Tensor, "backward", self._run_backward)

        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._capture.optimizers = self._optimizers

        # The script may end before the last step that is to be profiled.
        atexit.register(self._capture.finish)

    def _build(self, call: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        """The script wraps a model in DDP."""
        call(module, *args, **kwargs)
        if not self._capture.is_done:
            self._capture.modules.append(module)

    def _make_optimizer(self, call: Any, *args: Any, **kwargs: Any) -> None:
        """The script makes an optimizer of torch."""
        self._makes_optimizers = True
        call(*args, **kwargs)

    def _run_backward(self, call: Any, *args: Any, **kwargs: Any) -> None:
        """A backward pass: a step of its own where the script has no optimizer of torch."""
        is_inner = self._is_in_backward  # as of a mode of torch, which calls it again
        self._is_in_backward = True
        try:
            call(*args, **kwargs)
        finally:
            self._is_in_backward = is_inner

        is_main = threading.current_thread() is threading.main_thread()
        if is_main and not is_inner and not self._makes_optimizers:
            self._end_step(None)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """torch calls it before each step of any optimizer."""
        # A step that has raised has no end: its optimizer is replaced by the next one.
        if self._outermost is None or not is_inside_step(sys._getframe(1)):
            self._outermost = id(optimizer)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """torch calls it after each step of any optimizer, unless it raises."""
        if optimizer not in self._optimizers:
            self._add(optimizer)

        if self._outermost != id(optimizer):
            return

        self._outermost = None
        if optimizer in self._counted:
            self._end_step(optimizer)

    def _end_step(self, optimizer: Any) -> None:
        """A step of the script has ended. `optimizer`: that has taken it; None: none of torch."""
        if self._has_finished:
            self._stop_late()
            return

        self._num_steps += 1
        self._capture.optimizer = optimizer
        self._capture.num_optimizers = self._num_optimizers

        try:
            self._capture.begin_step(self._num_steps)
        except OSError as error:
            self._report(error)  # the other ranks wait for this one in `_finish`

        if self._capture.is_done:
            self._has_finished = True
            atexit.unregister(self._capture.finish)
            self._capture.modules.clear()
            self._capture.optimizer = None
            self._stop_late()
            self._finish()

    def _add(self, optimizer: Any) -> None:
        """The optimizer has taken its first step: are its steps those of the script, and is it
        another one or inside another one?"""
        parameters = {
            id(parameter) for group in optimizer.param_groups for parameter in group["params"]
        }

        if not self._first_updated:
            self._first_updated = parameters

        self._optimizers.add(optimizer)
        if not parameters.isdisjoint(self._first_updated):
            self._counted.add(optimizer)
        if parameters and parameters.isdisjoint(self._updated):
            self._num_optimizers += 1

        self._updated |= parameters

    def _stop_late(self) -> None:
        """The hook has done its work when the profiler is stopped."""
        if self._capture.stop_late():
            for hook in self._hooks:
                hook.remove()

    def _finish(self) -> None:
        """Collective."""
        import torch.distributed as dist

        if dist.is_initialized():
            try:
                self._capture.collect()
            except OSError as error:
                self._report(error)

        if self.ends_script:
            sys.exit(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """After the script. One that was ended may not have come to where it leaves its group, and
        Python's exit would free a group whose threads still run: sometimes that aborts the
        process."""
        is_recording = self._capture is not None and self._capture.is_recording

        # What the script itself has printed of its failure is the reason.
        has_succeeded = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        is_missing = has_succeeded and not is_recording and not self._has_finished
        if is_missing and self._topology.rank == 0:
            self._explain_nothing()

        if not (self.ends_script and self._has_finished):
            return

        from drumline.rank.group import leave_group

        try:
            leave_group()
        except Exception as error:  # its profile is written
            print_message(f"rank {self._topology.rank} could not leave its process group: {error}")

    def _explain_nothing(self) -> None:
        """No step was profiled: what was looked for, and what to do."""
        problem = f"nothing was profiled: {self.script} ended after {plural(self._num_steps, 'step')} of rank 0, "
        first, _, stop = self.steps.partition(":")
        if self._num_steps:
            print_message(
                f"{problem}before step {first}",
                f"try: let it take {stop} steps, or profile earlier ones (drumline launch --profile 2:4)",
            )
            return

        advice = "call loss.backward() on the main thread; if this script starts the one that trains, profile that one"
        looked_for = "step() of a torch.optim optimizer"
        if self._makes_optimizers:
            advice = "call the optimizer's step(), and not a function of its own"
        else:
            looked_for += " and Tensor.backward()"

        print_message(f"{problem}which are counted by {looked_for}", f"try: {advice}")

    def _report(self, error: OSError) -> None:
        """A trace that cannot be written does not end the script."""
        print_message(f"rank {self._topology.rank} could not write its trace: {error}")

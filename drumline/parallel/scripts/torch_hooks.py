"""Observes or profiles a script by wrapping functions of torch when the script imports it. Wrapped
functions return the same values, and nothing is attached to the script's own objects."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, cast

from drumline.base.rank_environment import Topology, own_variables, topology_from
from drumline.base.text import print_message
from drumline.parallel.scripts.script_recorder import ScriptRecorder
from drumline.watch.heartbeat import BACKWARD, DATA, FORWARD, OPTIMIZER, HeartbeatWriter, Phase


def observe_torch(activity: HeartbeatWriter, recorder: ScriptRecorder) -> None:
    """Begin when the script has imported torch."""
    call_after_torch(lambda: _wrap_torch(activity, recorder), "ranks are not compared")


def call_after_torch(loaded: Callable[[], None], without: str) -> None:
    """Call back when the script has imported torch. `without`: what is missing if the call
    fails."""
    after = _AfterTorch(loaded, without)
    if "torch" in sys.modules:
        after.call_back()
    else:
        sys.meta_path.insert(0, after)


class _AfterTorch(MetaPathFinder):
    """Finds no module; calls back when torch has been loaded."""

    def __init__(self, loaded: Callable[[], None], without: str) -> None:
        self._loaded = loaded
        self._without = without

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch" or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            self.call_back()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def call_back(self) -> None:
        try:
            self._loaded()
        except Exception as error:
            # A failure of the watchdog must not stop the script.
            print_message(
                f"{self._without}: this version of torch cannot be observed: {type(error).__name__}: {error}"
            )


def _wrap_torch(activity: HeartbeatWriter, recorder: ScriptRecorder) -> None:
    """`activity`: records which phase the main thread is in, for finding stragglers."""
    import torch
    from torch.distributed import Work
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )
    from torch.utils.data import DataLoader

    from drumline.rank.torch_internals import LoaderIterator

    is_compiling = torch.compiler.is_compiling
    main_thread = threading.main_thread().ident
    phase = int(Phase.BETWEEN)
    num_backward = 0
    activity.mark(phase)

    def is_observed() -> bool:
        return not is_compiling() and threading.get_ident() == main_thread

    def enter(following: int) -> int:
        """Returns the phase that was left."""
        nonlocal phase
        before, phase = phase, following
        activity.mark(following)
        return before

    def begin_optimizer(optimizer: Any, args: Any, kwargs: Any) -> None:
        if is_observed():
            recorder.modules.optimizers.add(optimizer)
            enter(OPTIMIZER)

    def end_optimizer(optimizer: Any, args: Any, kwargs: Any) -> None:
        if is_observed():
            enter(Phase.BETWEEN)

    def begin_backward() -> None:
        nonlocal num_backward
        # Here and not in forward, which may be compiled.
        num_backward += 1
        activity.begin_step(num_backward)
        with contextlib.suppress(Exception):
            recorder.modules.begin_backward()

    def timed(entered: int, before: Callable[[], None] | None = None) -> Callable[..., Any]:
        def wrapper(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not is_observed():
                return call(*args, **kwargs)
            if before is not None:
                before()
            last = enter(entered)
            try:
                return call(*args, **kwargs)
            finally:
                enter(last)

        return wrapper

    def build(call: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> None:
        call(module, *args, **kwargs)
        recorder.record_facts()
        with contextlib.suppress(Exception):
            recorder.modules.add(module)

    def iterate(call: Callable[..., Any], loader: Any) -> Any:
        recorder.record_loader(loader, sys._getframe(2))
        return call(loader)

    wrap_method(DistributedDataParallel, "__init__", build)
    wrap_method(DistributedDataParallel, "forward", timed(FORWARD))
    wrap_method(torch.Tensor, "backward", timed(BACKWARD, begin_backward))
    # A rank waits for the others here, as in backward.
    wrap_method(Work, "wait", timed(BACKWARD))
    wrap_method(DataLoader, "__iter__", iterate)
    wrap_method(LoaderIterator, "__next__", timed(DATA))
    register_optimizer_step_pre_hook(begin_optimizer)
    register_optimizer_step_post_hook(end_optimizer)


def wrap_method(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a method by `wrapper(method, *its arguments)`."""
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


class ScriptProfile:
    """Counts the steps of a script, and profiles some of them.

    A step ends with a step of the first optimizer that the script uses. After the last profiled
    step torch's modes, its hooks and Python's warnings are as they were. Only the constructor of
    `DistributedDataParallel` stays wrapped, and does what it did."""

    def __init__(self, steps: str, folder: Path, *, ends_script: bool, script: str) -> None:
        self._steps = steps
        self._folder = folder
        self._ends_script = ends_script
        self._script = script
        self._topology = topology_from(own_variables()) or Topology()
        self._num_steps = 0
        self._optimizers: list[int] = []
        self._capture: Any = None
        self._hook: Any = None
        self._has_ended_script = False

    def observe(self) -> None:
        """torch is loaded."""
        from torch.nn.parallel import DistributedDataParallel
        from torch.optim.optimizer import register_optimizer_step_post_hook

        from drumline.config.schema import profiled_steps
        from drumline.rank.watched.trace_capture import TraceCapture
        from drumline.runs.profile_files import PROFILE_FOLDER, JobFacts

        steps = profiled_steps(self._steps)
        assert steps is not None, self._steps
        self._capture = TraceCapture(
            steps,
            self._folder / PROFILE_FOLDER,
            rank=self._topology.rank,
            world_size=self._topology.world_size,
            local_world_size=self._topology.local_world_size,
            host=socket.gethostname(),
            job=JobFacts(task=self._script),
        )
        wrap_method(DistributedDataParallel, "__init__", self._build)
        self._hook = register_optimizer_step_post_hook(self._after_step)
        # The script may end before the last step that is to be profiled.
        atexit.register(self._capture.finish)

    def _build(self, call: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        call(module, *args, **kwargs)
        if not self._capture.is_done:
            self._capture.modules.append(module)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if id(optimizer) not in self._optimizers:
            self._optimizers.append(id(optimizer))
        if id(optimizer) != self._optimizers[0]:
            return
        self._num_steps += 1
        self._capture.optimizer = optimizer
        self._capture.num_optimizers = len(self._optimizers)
        try:
            self._capture.begin_step(self._num_steps)
        except OSError as error:
            self._report(error)  # the other ranks wait for this one in `_finish`
        if self._capture.is_done:
            self._hook.remove()
            atexit.unregister(self._capture.finish)
            self._capture.modules.clear()
            self._capture.optimizer = None
            self._finish()

    def _finish(self) -> None:
        """Collective."""
        import torch.distributed as dist

        if dist.is_initialized():
            try:
                self._capture.collect()
            except OSError as error:
                self._report(error)
        if self._ends_script:
            self._has_ended_script = True
            sys.exit(0)

    def close(self) -> None:
        """After the script. One that was ended may not have come to where it leaves its group, and
        Python's exit would free a group whose threads still run: sometimes that aborts the
        process."""
        if not self._has_ended_script:
            return
        from drumline.rank.group import leave_group

        try:
            leave_group()
        except Exception as error:  # its profile is written
            print_message(f"rank {self._topology.rank} could not leave its process group: {error}")

    def _report(self, error: OSError) -> None:
        print_message(f"rank {self._topology.rank} could not write its trace: {error}")

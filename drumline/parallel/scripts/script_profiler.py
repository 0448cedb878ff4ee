"""Profiles some steps of a script: `python -m drumline.parallel.scripts.script_profiler STEPS
FOLDER only|all watched|plain SCRIPT.py ARGS`, or `-m MODULE ARGS`.

A step ends with a step of the first optimizer that the script uses. The script itself is not
changed, and after the last profiled step torch's modes, its hooks and Python's warnings are as they
were. Only the constructor of `DistributedDataParallel` stays wrapped, and does what it did.
"""

from __future__ import annotations

import atexit
import socket
import sys
from pathlib import Path
from typing import Any

from drumline.base.terminal import print_message
from drumline.base.topology import Topology, own_variables, topology_from
from drumline.config.schema import profiled_steps
from drumline.parallel.scripts import script_runner
from drumline.parallel.scripts.torch_hooks import call_after_torch, wrap_method
from drumline.runs.profile_files import PROFILE_FOLDER, JobFacts


def main(words: list[str]) -> None:
    """Never returns before the script does; what it raises is raised."""
    steps, folder, until, how, *program = words
    profile = ScriptProfile(steps, Path(folder), ends_script=until == "only", script=program[0])
    call_after_torch(profile.observe, "nothing is profiled")
    (script_runner.main if how == "watched" else script_runner.run_program)(program)


class ScriptProfile:
    """Counts the steps of a script, and profiles some of them."""

    def __init__(self, steps: str, folder: Path, *, ends_script: bool, script: str) -> None:
        self._steps = steps
        self._folder = folder
        self._ends_script = ends_script
        self._script = script
        self._topology = topology_from(own_variables()) or Topology()
        self._num_steps = 0
        self._optimizer: int | None = None
        self._capture: Any = None
        self._hook: Any = None

    def observe(self) -> None:
        """torch is loaded."""
        from torch.nn.parallel import DistributedDataParallel
        from torch.optim.optimizer import register_optimizer_step_post_hook

        from drumline.rank.watched.trace_capture import TraceCapture

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
        atexit.register(
            self._capture.finish
        )  # the script may end before the last step that is to be profiled

    def _build(self, call: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        call(module, *args, **kwargs)
        if not self._capture.is_done:
            self._capture.modules.append(module)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._optimizer = self._optimizer or id(optimizer)
        if id(optimizer) != self._optimizer:
            return
        self._num_steps += 1
        self._capture.optimizer = optimizer
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
        import torch
        import torch.distributed as dist

        if dist.is_initialized():
            is_nccl = dist.get_backend() == "nccl"
            device = (
                torch.device("cuda", torch.cuda.current_device())
                if is_nccl
                else torch.device("cpu")
            )
            try:
                self._capture.collect(device)
            except OSError as error:
                self._report(error)
        if self._ends_script:
            sys.exit(0)

    def _report(self, error: OSError) -> None:
        print_message(f"rank {self._topology.rank} could not write its trace: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])

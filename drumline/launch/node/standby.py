"""Standby processes that have loaded what a rank needs: restarted ranks begin in one of them.

Loading torch takes seconds, most of a restart. A waiting process costs memory, but no CPU time. It
is a child of this agent, and gets the environment and output files of the rank when it begins.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from drumline.base.startup import begin_now, loading, use_private_cache

# Everything that a task's rank loads before it reads its arguments.
RANK_MODULES = ("drumline.cli.train_rank",)
# At first the ranks are busy loading the same modules.
AFTER_S = 10.0


class Standby:
    """One process for each rank of this node, after enough calls of `fill`."""

    def __init__(
        self,
        program: Sequence[str],
        *,
        count: int,
        modules: Sequence[str] = RANK_MODULES,
    ) -> None:
        """`program`: Python's arguments for a rank; `modules`: what is imported before."""
        self._program = tuple(program)
        self._modules = tuple(modules)
        self._count = count
        self._waiting: list[tuple[subprocess.Popen[bytes], int]] = []
        """The processes, each with the pipe that it reads."""
        self._fill_at = time.monotonic() + AFTER_S

    def fill(self, *, at_once: bool = False) -> None:
        """Start one more, if it is time: one by one, so that training ranks keep their cores.
        `at_once`: all."""
        if not at_once and time.monotonic() < self._fill_at:
            return

        missing = self._count - len(self._waiting)
        for _ in range(missing if at_once else min(missing, 1)):
            self._start_one()

        self._fill_at = time.monotonic() + AFTER_S / 2

    def _start_one(self) -> None:
        """Start a process that waits at the end of a pipe."""
        reading, writing = os.pipe()
        modules = ",".join(self._modules)
        try:
            process = subprocess.Popen(
                # The program is there for `ps`.
                [sys.executable, "-m", __spec__.name, str(reading), modules, *self._program],
                stdin=subprocess.DEVNULL,
                pass_fds=[reading],
                start_new_session=True,
            )
            self._waiting.append((process, writing))
        except OSError:  # no memory for one more, most likely: the rank starts without
            os.close(writing)

        os.close(reading)

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """In this block, ranks that torch's agent starts begin in standby processes, if there are
        any."""
        from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

        cold = SubprocessHandler._popen

        def start(
            handler: Any, args: tuple[str, ...], env: dict[str, str]
        ) -> subprocess.Popen[bytes]:
            """In place of torch's own start of a process."""
            return self._take(args, env, handler._stdout, handler._stderr) or cold(
                handler,
                args,
                env,
            )

        SubprocessHandler._popen = start  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            SubprocessHandler._popen = cold  # type: ignore[method-assign]
            self._fill_at = time.monotonic() + AFTER_S

    def _take(
        self,
        args: tuple[str, ...],
        env: Mapping[str, str],
        out: Any,
        err: Any,
    ) -> subprocess.Popen[bytes] | None:
        """None if there is none, or if the rank must be started in another way, such as on chosen
        cores."""
        if args != (sys.executable, *self._program):
            return None

        order = {"env": dict(env), "files": [file.name if file else None for file in (out, err)]}
        while self._waiting:
            process, writing = self._waiting.pop(0)
            with contextlib.suppress(OSError):  # it was killed
                with open(writing, "wb") as pipe:  # noqa: PTH123
                    pipe.write(json.dumps(order).encode())
                if process.poll() is None:
                    return process

        return None

    def close(self) -> None:
        """Close the pipes: standby processes then exit."""
        for _, pipe in self._waiting:
            os.close(pipe)
        self._waiting = []


def main(pipe: str, modules: str, *program: str) -> None:
    """Load the modules, wait for the order, and become a rank."""
    use_private_cache()
    with loading():
        for module in modules.split(","):
            importlib.import_module(module)
        if "torch" in sys.modules:
            from drumline.rank.torch_internals import load_compiler

            load_compiler()  # torch does so with the first optimizer

    with open(int(pipe), "rb") as file:  # noqa: PTH123
        order = json.loads(file.read() or b"{}")

    if not order:  # not needed
        return

    begin_now()
    os.environ.update(order["env"])
    for number, path in enumerate(order["files"], start=1):
        if path is not None:
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
            os.dup2(descriptor, number)
            os.close(descriptor)

    sys.argv = list(program[1:])
    runpy.run_module(program[1], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

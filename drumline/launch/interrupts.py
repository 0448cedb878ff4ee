"""Ctrl-C: while a command starts it exits at once, and the last line says what the same command would do.

Python's own handler raises KeyboardInterrupt wherever the main thread is. While modules are imported that may be in a
callback of importlib, which drops it: 8 of 40 interrupts in the first 4 s of `--procs 2` were lost.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from drumline.errors import ExitCode
from drumline.terminal import paragraph

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""What ends a launcher and its ranks."""
INTERRUPTED_EARLY = "interrupted before the first step; rerun the same command"
Handler = Callable[[int, FrameType | None], object]


def set_handler(number: signal.Signals, handler: Handler | signal.Handlers) -> None:
    """Unless the signal was ignored when the command began (nohup, a shell's `&`): then it stays ignored."""
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, handler)


def exit_handler(code: ExitCode, message: str) -> Handler:
    """A handler for as long as there is nothing to save and nobody to inform."""
    data = paragraph(message).encode() if message else b""

    def end(number: int, frame: FrameType | None) -> None:
        if data:
            os.write(2, data)  # past Python's buffers, which may be in use
        os._exit(code)

    return end


@contextmanager
def interruptible(message: str) -> Iterator[None]:
    """For imports that take long."""
    set_handler(signal.SIGINT, exit_handler(ExitCode.INTERRUPTED, message))
    try:
        yield
    finally:
        set_handler(signal.SIGINT, signal.default_int_handler)


def interrupted(run: Path | None, arguments: Sequence[str]) -> str:
    """The last line after Ctrl-C. `run`: the run folder, where it is known here; `arguments` of `drumline train`."""
    again = "rerun the same command without --fresh" if "--fresh" in arguments else "rerun the same command"
    if run is None:
        return f"interrupted; {again} to resume from the newest checkpoint, if one was saved"
    if any((run / "checkpoints").glob("step-*")):
        return f"interrupted; {again} to resume from the newest checkpoint"
    return "interrupted before the first save; rerun the same command to start from the beginning"

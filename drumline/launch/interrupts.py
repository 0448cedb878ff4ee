"""Ctrl-C while a command starts: it ends the process at once.

Python's own handler raises KeyboardInterrupt wherever the main thread is. While modules are imported that may be in a
callback of importlib, which drops it: 8 of 40 interrupts in the first 4 s of `--procs 2` were lost.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from drumline.errors import ExitCode
from drumline.terminal import paragraph

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""What ends a launcher and its ranks."""
INTERRUPTED_EARLY = "interrupted before the first step; rerun the same command"
Handler = Callable[[int, FrameType | None], object]


def heed(number: signal.Signals, handler: Handler | signal.Handlers) -> None:
    """Have a signal handled, unless it was ignored when the command began (nohup, a shell's `&`): then it stays so."""
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, handler)


def end_at_once(code: ExitCode, message: str) -> Handler:
    """A handler for as long as there is nothing to save and nobody to inform."""
    # Past Python's buffers, which may be in use.
    data = paragraph(message).encode() if message else b""

    def end(number: int, frame: FrameType | None) -> None:
        if data:
            os.write(2, data)
        os._exit(code)

    return end


@contextmanager
def interruptible(message: str) -> Iterator[None]:
    """Import what takes long in here."""
    heed(signal.SIGINT, end_at_once(ExitCode.INTERRUPTED, message))
    try:
        yield
    finally:
        heed(signal.SIGINT, signal.default_int_handler)

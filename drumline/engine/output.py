"""Where a rank's output goes: its event file, its log file, and the user's screen.

Rank 0 shows the run on the screen. The other ranks write to log files of their own; the screen is kept for a failure.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Literal, TextIO

from drumline.config.schema import LogConfig
from drumline.engine.run_folder import RunFolder
from drumline.errors import log
from drumline.manager import DDPManager
from drumline.metrics.display import Display, PlainDisplay
from drumline.metrics.events import EventLog, Reporter, Sink
from drumline.metrics.tensorboard import TensorBoard
from drumline.untrusted import APPEND, descriptor_of, open_log

_screen: TextIO | None = None


def divert_output(path: Path) -> None:
    """Send everything this process prints, C++ libraries included, to a file; the screen is kept for a failure."""
    global _screen
    sys.stdout.flush()
    sys.stderr.flush()
    _screen = os.fdopen(os.dup(2), "w", encoding=sys.stderr.encoding, errors="backslashreplace")
    target = descriptor_of(path, APPEND)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)


def is_diverted() -> bool:
    """Whether what this process prints goes to its log."""
    return _screen is not None


def screen() -> TextIO:
    """The user's screen, also after `divert_output`."""
    return _screen or sys.stderr


class _WarningsAsEvents(logging.Handler):
    def __init__(self, reporter: Reporter) -> None:
        super().__init__(logging.WARNING)
        self._reporter = reporter

    def emit(self, record: logging.LogRecord) -> None:
        self._reporter.report("warning", message=record.getMessage())


@contextmanager
def open_reporter(settings: LogConfig, folder: RunFolder, ddp: DDPManager) -> Iterator[Reporter]:
    """A reporter for one run on one rank. Warnings of the package's logger become events too."""
    with ExitStack() as stack:
        log_file = stack.enter_context(open_log(folder.log_file(ddp.rank)))
        plain = make_display("plain", log_file)
        events = stack.enter_context(closing(EventLog(folder.event_file(ddp.rank))))
        sinks: list[Sink] = [events]
        if ddp.is_main_process():
            sinks += [plain, make_display(settings.display, sys.stdout)]
            if settings.tensorboard:
                sinks.append(TensorBoard(folder.tensorboard))
        else:  # its log may be shown beside rank 0's
            sinks.append(lambda event: plain(event) if event["kind"] == "warning" else None)
        reporter = stack.enter_context(Reporter(sinks, rank=ddp.rank, host=ddp.host))
        handler = _WarningsAsEvents(reporter)
        log.logger.addHandler(handler)
        stack.callback(log.logger.removeHandler, handler)
        yield reporter


def make_display(mode: Literal["auto", "live", "plain", "none"], stream: TextIO) -> Display:
    """The display for a stream; `auto` is live on a terminal that can move its cursor, and plain elsewhere."""
    if mode == "none":
        return Display()
    if mode == "plain" or (mode == "auto" and not stream.isatty()):
        return PlainDisplay(stream)
    from drumline.metrics.live import LiveDisplay  # the plain display does without rich

    live = LiveDisplay(stream)
    return live if mode == "live" or live.can_animate else PlainDisplay(stream)

"""Where a rank's events go: its event file, its log file, and on rank 0 the screen and TensorBoard.

Rank 0 tells how the run goes. What the others write to their logs may be shown beside it, so there it is only warnings.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from drumline.config.schema import LogConfig
from drumline.engine.run_folder import RunFolder
from drumline.manager import DDPManager
from drumline.metrics.display import make_display
from drumline.metrics.events import EventLog, Reporter, Sink
from drumline.metrics.tensorboard import TensorBoard
from drumline.untrusted import open_log


class _WarningsAsEvents(logging.Handler):
    """What any room warns of through logging becomes an event like the others."""

    def __init__(self, reporter: Reporter) -> None:
        super().__init__(logging.WARNING)
        self._reporter = reporter

    def emit(self, record: logging.LogRecord) -> None:
        self._reporter.report("warning", message=record.getMessage())


@contextmanager
def open_reporter(settings: LogConfig, folder: RunFolder, ddp: DDPManager) -> Iterator[Reporter]:
    """A reporter for one run on one rank."""
    with ExitStack() as stack:
        log_file = stack.enter_context(open_log(folder.log_file(ddp.rank)))
        log = make_display("plain", log_file)
        sinks: list[Sink] = [EventLog(folder.event_file(ddp.rank))]
        if ddp.is_main_process():
            sinks += [log, make_display(settings.display, sys.stdout)]
            if settings.tensorboard:
                sinks.append(TensorBoard(folder.tensorboard))
        else:
            sinks.append(lambda event: log(event) if event["kind"] == "warning" else None)
        reporter = stack.enter_context(Reporter(sinks, rank=ddp.rank, host=ddp.host))
        handler = _WarningsAsEvents(reporter)
        logger = logging.getLogger("drumline")
        logger.addHandler(handler)
        stack.callback(logger.removeHandler, handler)
        yield reporter

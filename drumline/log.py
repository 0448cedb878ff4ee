"""Warnings: `log.warning(...)` goes to the logger `drumline`, as lines that steer no terminal.

In a loop of the user's own nobody may have set logging up; Python then prints them as they are.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import MutableMapping
from typing import Any

from drumline.errors import DrumlineError, as_lines
from drumline.terminal import one_line, print_message


class _HarmlessLog(logging.LoggerAdapter[logging.Logger]):
    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        msg = msg.in_a_line if isinstance(msg, DrumlineError) else msg
        below = traceback.format_exc().splitlines() if kwargs.pop("exc_info", None) else []
        return "\n  ".join([*as_lines(str(msg)), *map(one_line, below)]), kwargs


class _AsMessage(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print_message(*self.format(record).splitlines())


def report_uncaught_errors() -> None:
    """For a command: what a thread or an asyncio task raises would else be printed by Python as it is."""

    def report(failed: threading.ExceptHookArgs) -> None:
        lines = traceback.format_exception(failed.exc_type, failed.exc_value, failed.exc_traceback)
        print_message(f"error: a thread failed: {failed.exc_value!r}", *"".join(lines).splitlines())

    threading.excepthook = report
    if not (asyncio_log := logging.getLogger("asyncio")).handlers:
        asyncio_log.addHandler(_AsMessage())
        asyncio_log.propagate = False


log = _HarmlessLog(logging.getLogger("drumline"), {})

"""Warnings: `log.warning(...)` goes to the logger `drumline`, as lines that steer no terminal.

In a loop of the user's own nobody may have set logging up; Python then prints them as they are.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import MutableMapping
from typing import Any

from drumline.errors import DrumlineError, as_lines
from drumline.terminal import one_line


class _HarmlessLog(logging.LoggerAdapter[logging.Logger]):
    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        msg = msg.in_a_line if isinstance(msg, DrumlineError) else msg
        below = traceback.format_exc().splitlines() if kwargs.pop("exc_info", None) else []
        return "\n  ".join([*as_lines(str(msg)), *map(one_line, below)]), kwargs


log = _HarmlessLog(logging.getLogger("drumline"), {})

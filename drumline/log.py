"""Warnings: `log.warning(...)` goes to the logger `drumline`, as one line that steers no terminal.

In a loop of the user's own nobody may have set logging up; Python then prints them as they are.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import MutableMapping
from typing import Any

from drumline.errors import DrumlineError
from drumline.terminal import one_line


class _HarmlessLog(logging.LoggerAdapter[logging.Logger]):
    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        msg = msg.in_a_line if isinstance(msg, DrumlineError) else msg
        below = traceback.format_exc().splitlines() if kwargs.pop("exc_info", None) else []
        return "\n  ".join(map(one_line, [msg, *below])), kwargs


log = _HarmlessLog(logging.getLogger("drumline"), {})

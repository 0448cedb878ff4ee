"""What the watch has noticed, told by rank 0 with its log lines: stragglers, stalls, and that they are over.

The sidecars look beside the run; the chief of them appends to a file in the watch folder what a user should read in the
run's own log, and rank 0 looks there when it writes a log line. That costs it one question to the system.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from drumline.metrics.events import Reporter
from drumline.metrics.json_lines import parse_line
from drumline.watch.sidecar.telling import NOTICES


class Notices:
    """Reads on from where it stopped. Without a folder, or before there is a file, nothing was noticed."""

    def __init__(self, folder: Path | None) -> None:
        self._file = None if folder is None else folder / NOTICES
        if self._file is not None:
            with suppress(OSError):
                self._file.touch()  # the sidecar then leaves it to us to tell
        self._read = 0
        self._slow: dict[tuple[Any, Any], str] = {}

    @property
    def stragglers(self) -> list[str]:
        """Of the whole run: what was said last of each rank or host, without what to do about it."""
        return list(self._slow.values())

    def report(self, reporter: Reporter) -> None:
        """Tell what is new."""
        for notice in self._new():
            message, about = (
                notice["message"],
                {f"about_{name}": notice.get(name) for name in ("rank", "host")},
            )
            if notice["kind"] == "recovery":
                reporter.report("note", message=message)
            elif notice["kind"] in ("straggler", "stall"):
                reporter.report(notice["kind"], message=message, **about)
            if notice["kind"] == "straggler":
                words = message.removeprefix("straggler: ").partition(". Next:")[0]
                self._slow[notice.get("host"), notice.get("rank")] = words

    def _new(self) -> list[dict[str, Any]]:
        if self._file is None:
            return []
        try:
            if self._file.stat().st_size <= self._read:
                return []
            with self._file.open("rb") as file:
                file.seek(self._read)
                text = file.read()
        except OSError:
            return []
        whole = text[: text.rfind(b"\n") + 1]  # the rest is being written
        self._read += len(whole)
        found = (parse_line(line) for line in whole.splitlines())
        return [
            notice
            for notice in found
            if notice is not None and all(isinstance(notice.get(name), str) for name in ("kind", "message"))
        ]

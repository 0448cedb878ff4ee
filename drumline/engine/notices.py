"""Reports what the sidecars noticed (stragglers, stalls, recoveries) in the run's own log and events.

The leader of the sidecars appends to a file in the watch folder; rank 0 looks there with each log line, which costs it
one `stat`.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from drumline.metrics.events import Reporter
from drumline.metrics.json_lines import parse_line
from drumline.watch.sidecar.sidecar_reporter import NOTICES


class WatchNotices:
    """Reads the file from where it stopped. Without a folder, or before there is a file, there are no notices."""

    def __init__(self, folder: Path | None) -> None:
        self._file = None if folder is None else folder / NOTICES
        if self._file is not None:
            with suppress(OSError):
                self._file.touch()  # where it exists, the sidecar does not print
        self._read = 0
        self._slow: dict[tuple[Any, Any], str] = {}

    @property
    def stragglers(self) -> list[str]:
        """Of the whole run: the latest notice about each rank or host."""
        return list(self._slow.values())

    def report(self, reporter: Reporter) -> None:
        """Report what is new."""
        for notice in self._new():
            kind, rank, host = notice["kind"], notice.get("rank"), notice.get("host")
            if kind == "recovery":
                reporter.report("note", message=notice["message"])
            elif kind in ("straggler", "stall"):
                reporter.report(kind, message=notice["message"], about_rank=rank, about_host=host)
            if kind == "straggler":
                self._slow[host, rank] = str(notice.get("what", ""))

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

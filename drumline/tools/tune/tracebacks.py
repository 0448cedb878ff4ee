"""What the tracebacks of one process say beside their exceptions: the program's own frame, and which
exceptions belong to one chain."""

from __future__ import annotations

import re
from dataclasses import dataclass

FRAME = re.compile(r'File "([^"]{1,200})", line (\d{1,7}), in (\S{1,80})')
IN_PACKAGES = ("site-packages", "dist-packages", "/lib/python", "<frozen", "<string>", "/bin/")
CHAIN = ("above exception was the direct cause", "handling of the above exception")
MAX_SOURCE = 80


@dataclass
class TracebackReader:
    frame: str = ""  # the last frame of the program itself
    is_chained: bool = False  # the next exception follows from the last one
    _source_column: int | None = None  # where the source text of the frame begins

    def read(self, text: str) -> None:
        """A line; most are no part of a traceback."""
        if self._source_column is not None:
            source = text[self._source_column :].strip()[:MAX_SOURCE]
            self.frame += f": {source}" if source and 'File "' not in text else ""
            self._source_column = None

        if 'File "' in text:
            self._read_frame(text)
        elif "Traceback (most recent" in text:
            self.frame = ""
        elif any(words in text for words in CHAIN):
            self.is_chained = True

    def _read_frame(self, text: str) -> None:
        frame = FRAME.search(text)
        if frame is None or any(folder in frame[1] for folder in IN_PACKAGES):
            return

        path, line, function = frame.groups()
        self.frame = f"{path}, line {line}, in {function}"
        self._source_column = frame.start()

    def end(self) -> None:
        """An exception was read: the next traceback begins."""
        self.frame = ""
        self.is_chained = False

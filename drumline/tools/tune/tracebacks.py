"""What the tracebacks of one process say beside their exceptions: the program's own frame, and which
exceptions belong to one chain."""

from __future__ import annotations

import re
from dataclasses import dataclass

FRAME = re.compile(r'File "([^"]{1,200})", line (\d{1,7}), in (\S{1,80})')
IN_PACKAGES = ("site-packages", "dist-packages", "/lib/python", "<frozen", "<string>", "/bin/")
CHAIN = "above exception"  # between the exceptions of a chain
MAX_SOURCE = 80


@dataclass
class TracebackReader:
    frame: str = ""  # the last frame of the program itself
    is_chained: bool = False  # the next exception follows from the last one
    _source_column: int | None = None  # of a frame; its source text follows
    _is_in_program: bool = False

    def read(self, text: str) -> bool:
        """A line; most are no part of a traceback. Whether it is a frame or its code, which are no
        messages."""
        source = "" if self._source_column is None else text[self._source_column :]
        self._source_column = None
        if source.startswith("  "):
            if self._is_in_program:
                self.frame += f": {source.strip()[:MAX_SOURCE]}"

            return True

        if 'File "' in text and (frame := FRAME.search(text)):
            self._read_frame(frame)
            return True

        if "Traceback (most recent" in text:
            self.frame = ""
        elif CHAIN in text:
            self.is_chained = True

        return False

    def _read_frame(self, frame: re.Match[str]) -> None:
        path, line, function = frame.groups()
        self._source_column = frame.start()
        self._is_in_program = not any(folder in path for folder in IN_PACKAGES)
        if self._is_in_program:
            self.frame = f"{path}, line {line}, in {function}"

    def end(self) -> None:
        """An exception was read: the next traceback begins."""
        self.frame = ""
        self.is_chained = False

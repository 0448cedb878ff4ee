"""Prints. Files may come from anyone, so control characters are escaped."""

from __future__ import annotations

import os
import re
import sys
from typing import TextIO

CLEAR_LINE = "\r\x1b[K"

# A colour; a newline; control characters but tab; line separators that only some programs know;
# characters that change the direction of text or are invisible; and lone surrogates, which stand
# for raw bytes. Colours have digits only: `ESC [ > 4 m` changes what keys send. Joiners (200c,
# 200d) stay: some scripts need them.
_SPECIAL = re.compile(
    "\x1b\\[[0-9;:]{0,40}m|\n|"
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def one_line(text: object) -> str:
    """The text with newlines and special characters escaped."""
    return _SPECIAL.sub(_escaped, str(text))


def print_message(prefix: str, text: object, *indented: object) -> None:
    """Print a line on stderr after the command's name, and others below it, indented.

    For example:

        drumline-lint: error: no PATH was given
          try: give files or folders, as in: drumline-lint .
    """
    lines = [f"{prefix}: {one_line(text)}", *(f"  {one_line(line)}".rstrip() for line in indented)]
    clear = CLEAR_LINE if sys.stderr is not None and sys.stderr.isatty() else ""
    _write(clear + "".join(f"{line}\n" for line in lines), sys.stderr)


def show(text: str, *, is_coloured: bool = False) -> None:
    """Print on stdout.

    Text for programs, such as JSON or a diff, is printed as it is where stdout is no terminal.
    """

    def shown(character: re.Match[str]) -> str:
        is_colour = is_coloured and len(character[0]) > 1
        return character[0] if is_colour or character[0] == "\n" else _escaped(character)

    if is_coloured or (sys.stdout is not None and sys.stdout.isatty()):
        text = _SPECIAL.sub(shown, text)
    _write(text, sys.stdout)


def show_progress(text: str) -> None:
    """Replace the last line on stderr; an empty text clears it."""
    import shutil  # only a terminal needs it

    width = shutil.get_terminal_size().columns - 1
    _write(f"{CLEAR_LINE}{one_line(text)[:width]}", sys.stderr)


def _write(text: str, stream: TextIO | None) -> None:
    """Write it in the encoding of the stream; what that does not have is escaped."""
    if stream is None:  # closed when the process began
        return

    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except BrokenPipeError:  # `| head`: the exit code stays the same
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _escaped(character: re.Match[str]) -> str:
    r"""`\x1b` of an escape character."""
    return character[0].encode("unicode_escape").decode()

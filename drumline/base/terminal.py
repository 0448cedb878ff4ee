"""The only place that writes to a terminal.

Text may come from another process, user, host or file. Control characters are printed as escapes,
and such text never begins a line that looks like Drumline's own: SECURITY.md.
"""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console
    from rich.segment import Segment
    from rich.text import Text

PREFIX = "drumline: "
CLEAR_LINE = "\r\x1b[K"
RESET = "\x1b[0m"
# Colours, newlines, control characters except tab (C0, DEL, C1), rare line endings, characters that
# change the text direction or are invisible, and lone surrogates, which stand for raw bytes.
# Colours have digits only: `ESC [ > 4 m` changes what keys send. Joiners (200c, 200d) are not in
# it: some scripts need them.
_SPECIAL = re.compile(
    "\x1b\\[[0-9;:]{0,40}m|\n|"
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
_unread_pipes: set[int] = set()
"""Descriptors of pipes without a reader."""


def shown(text: str) -> str:
    """The text with control characters escaped, except tabs and newlines."""
    return _SPECIAL.sub(_visible_or_newline, text)


def one_line(text: object) -> str:
    """The text as one line of a message or a table cell: newlines are escaped too."""
    return _SPECIAL.sub(_visible, str(text))


def coloured_line(text: str) -> str:
    """One line of a rank's output: colours are kept, and reset at its end."""
    line = _SPECIAL.sub(_visible_or_colour, text)
    return f"{line}{RESET}" if "\x1b" in line else line


def paragraph(text: object, *details: object) -> str:
    """A message of Drumline's, with indented lines of details below it."""
    lines = [f"{PREFIX}{one_line(text)}", *(f"  {one_line(detail)}".rstrip() for detail in details)]
    return "".join(f"{line}\n" for line in lines)


def print_message(text: object, *details: object, stream: TextIO | None = None) -> None:
    """Print such a message on stderr in one write, since several threads may print. It replaces a
    progress line."""
    stream = stream or sys.stderr
    clear = CLEAR_LINE if _is_terminal(stream) else ""
    _write(clear + paragraph(text, *details), stream)


def show(
    text: str, *, end: str = "\n", stream: TextIO | None = None, is_data: bool = False
) -> None:
    """Print a page, a table or a help text on stdout. The caller has passed values in it through
    `one_line`.

    `is_data`: output for programs, unchanged unless it goes to a terminal.
    """
    stream = stream or sys.stdout
    if not is_data or _is_terminal(stream):
        text = shown(text)
    _write(f"{text}{end}", stream)


def show_lines(lines: Iterable[object], *, stream: TextIO | None = None) -> None:
    """Print each as one line, on stdout."""
    show("\n".join(map(one_line, lines)), stream=stream)


def show_progress(text: str) -> None:
    """Replace the last line of a terminal on stderr; empty: clear it."""
    import shutil  # most commands do not need it

    width = shutil.get_terminal_size().columns - 1
    _write(f"{CLEAR_LINE}{one_line(text)[:width]}", sys.stderr)


def make_console(stream: TextIO | None = None, **options: Any) -> Console:
    """A rich console that reads no markup in text, and escapes text before layout."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.text import Text

    class SafeConsole(Console):
        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterable[Segment]:
            if isinstance(renderable, str):
                renderable = shown(renderable)
            elif isinstance(renderable, Text):
                renderable = _escaped(renderable)
            return super().render(renderable, options)

    return SafeConsole(file=stream, highlight=False, markup=False, emoji=False, **options)


def _escaped(text: Text) -> Text:
    """Rich's text, as it is if it has no special characters: setting `plain` removes its styles."""
    plain = shown(text.plain)
    if plain == text.plain:
        return text
    copy = text.copy()
    copy.plain = plain
    return copy


def is_read() -> bool:
    """Whether stdout may still have a reader. A command that only shows something ends when there
    is none."""
    if sys.stdout is None:
        return False
    return not _unread_pipes or sys.stdout.fileno() not in _unread_pipes


def _write(text: str, stream: TextIO | None) -> None:
    if stream is None:  # closed when the process began
        return
    try:
        # A letter that an ASCII terminal or pipe cannot have must not end a job.
        encoding = (
            getattr(stream, "encoding", None) or "utf-8"
        )  # a StringIO, or the user's own object
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except BrokenPipeError:
        # `| head` has read enough; the command continues, with the same exit code.
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, stream.fileno())
        os.close(devnull)
        _unread_pipes.add(stream.fileno())


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and getattr(stream, "isatty", bool)()


def _visible(special: re.Match[str]) -> str:
    return special[0].encode("unicode_escape").decode()


def _visible_or_newline(special: re.Match[str]) -> str:
    return "\n" if special[0] == "\n" else _visible(special)


def _visible_or_colour(special: re.Match[str]) -> str:
    """Only the sequence of a colour has more than one character."""
    return special[0] if len(special[0]) > 1 else _visible(special)

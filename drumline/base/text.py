"""Text for people: numbers, sizes, durations, names and ranks in words, and the only place that writes
to a terminal.

Text may come from another process, user, host or file. Control characters are printed as escapes,
and such text never begins a line that looks like Drumline's own: SECURITY.md.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import signal
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
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
MIB = 1 << 20
GIB = 1 << 30
MAX_NAMES = 4
MAX_VALUE = 200
CREDENTIALS = re.compile(r"://([^/]*@|[^/\[]*:(?!\d+/).*@|.*\?)|\b(s3|gs|gcs|az)://[^/]*:.*@")
"""In an address: a user, a password (a key of AWS may contain slashes) or options. A bucket has no
port: what looks like one before an `@` is the beginning of a password."""
# To the last `@` before a quotation mark, as a password may contain spaces; then to the next space.
_ADDRESS = re.compile(r"://(?:[^`'\"\n]*@)?\S*")
_OPTIONS = re.compile(r"\?[^\s`'\"]*")


# In words


def without_credentials(text: str) -> str:
    """Text of a library, in which an address may hold a user, a password or options; its host
    stays."""
    return _ADDRESS.sub(_hide_secrets, text)


def _hide_secrets(address: re.Match[str]) -> str:
    login, separator, host = address[0].rpartition("@")
    # A password with a question mark, or options with an `@`: where the host begins is unknown.
    if "?" in login:
        return "://***"
    if separator:
        host = f"://***@{host}"
    return _OPTIONS.sub("?***", host)


def plural(count: float, noun: str) -> str:
    """`1 step`, `1,437 steps`."""
    return f"{count:,.0f} {noun}{'' if count == 1 else 's'}"


def span(first: int, last: int, noun: str) -> str:
    """`step 7`, `steps 7 to 9`."""
    return f"{noun} {first:,}" if first == last else f"{noun}s {first:,} to {last:,}"


def columns(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> list[str]:
    """A line for each row, with columns as wide as their longest value; those in `right` end in
    line."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    formats = [f"{'>' if column in right else '<'}{width}" for column, width in enumerate(widths)]
    return ["  ".join(map(format, row, formats)).rstrip() for row in rows]


def join_names(names: Iterable[object], *, most: int = MAX_NAMES) -> str:
    """`a`, `a and b`, `a, b and c`, `a, b, c, d and 252 more`."""
    items = list(map(str, names))
    if len(items) > most + 1:
        items[most:] = [f"{len(items) - most} more"]
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"


def number_ranges(numbers: Iterable[int]) -> str:
    """`0, 1, 4-7`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs
    )


def _shortened(text: str) -> str:
    """At most `MAX_VALUE` characters; the hash shows a difference after them."""
    if len(text) <= MAX_VALUE:
        return text
    digest = hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()
    return f"{text[:MAX_VALUE]}... ({digest[:8]})"


def named_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 1, 4-7`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {number_ranges(ranks)}"


def by_rank(values: Sequence[Any], hosts: Sequence[str], ranks: Sequence[int] | None = None) -> str:
    """`ranks 0, 2 (node-a): 5; rank 1 (node-b): 7`, the most common value first. `ranks` defaults
    to all."""
    if ranks is None:
        ranks = range(len(hosts))
    host_of = dict(zip(ranks, hosts, strict=True))
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for rank, value in zip(ranks, values, strict=True):
        ranks_of[_shortened(str(value))].append(rank)
    clauses = []
    for value in sorted(ranks_of, key=lambda value: (-len(ranks_of[value]), ranks_of[value])):
        value_hosts = sorted({host_of[rank] for rank in ranks_of[value]})
        clauses.append(f"{named_ranks(ranks_of[value])} ({join_names(value_hosts)}): {value}")
    return "; ".join(clauses)


def duration(seconds: float) -> str:
    """`40 ms`, `4.1 s`, `41 s`, `12 min 05 s`, `3 h 20 min`, `2 d 03 h`: two units at most."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, unit, small_size, small_unit in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // small_size:02d} {small_unit}"
    return f"{whole} s"


def clock(seconds: float) -> str:
    """`0:41`, `12:05`, `3:20:11`: for a display, where the width should seldom change."""
    if not math.isfinite(seconds):
        return "-:--"
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"


def file_size(num_bytes: float) -> str:
    """`1.4 MB`, in powers of 1000, as usual for disks."""
    return _scaled(num_bytes, 1000, ("B", "kB", "MB", "GB", "TB"))


def memory_size(num_bytes: float) -> str:
    """`64 MiB`, `1.5 GiB`, in powers of 1024, as usual for memory."""
    return _scaled(num_bytes, 1024, ("bytes", "KiB", "MiB", "GiB", "TiB"))


def _scaled(value: float, base: int, units: Sequence[str]) -> str:
    unit = units[0]
    for larger in units[1:]:
        if value < base - 0.5:
            break
        value = value / base
        unit = larger
    if unit == units[0] or value >= 999.5:
        return f"{value:.0f} {unit}"
    return f"{value:.3g} {unit}"


def bit_rate(bytes_per_s: float) -> str:
    """`9.4 Gbit/s`, as usual for networks."""
    bits = bytes_per_s * 8
    for size, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
        if bits >= size:
            return f"{two_digits(bits / size)} {unit}"
    return f"{bits:.0f} bit/s"


def latency(seconds: float) -> str:
    """`12 us`, `0.12 ms`."""
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-4 else f"{two_digits(seconds * 1e3)} ms"


def two_digits(value: float) -> str:
    """`0.12`, `9.4`, `112`."""
    if value < 1:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def signal_name(number: int) -> str:
    """`SIGKILL`, or `signal 35` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def how_it_ended(code: int) -> str:
    """`exit code 7`, or `killed by SIGKILL`, for the return code of a process."""
    return f"exit code {code}" if code >= 0 else f"killed by {signal_name(-code)}"


# Printing


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
        # A StringIO, or the user's own object, may have no encoding.
        encoding = getattr(stream, "encoding", None) or "utf-8"
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

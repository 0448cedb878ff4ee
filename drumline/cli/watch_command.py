"""`drumline watch RUN`: the status of a running job, from another terminal: a row for each rank, as
it changes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from drumline.base.errors import ExitCode
from drumline.base.text import columns, is_read, make_console, one_line, show_lines
from drumline.cli.command_line import HELP_FLAG, check_run_is_named, read_command, show_json
from drumline.config import FlagTable, switch
from drumline.config.schema import Bounds
from drumline.runs.run_folder import find_run
from drumline.watch.run_status import FATAL_NOTICES, RunStatus, RunStatusReader
from drumline.watch.status_file import STATUS_FILE
from drumline.watch.status_table import (
    HEADINGS,
    RowLevel,
    StatusRow,
    all_rows,
    fitting_rows,
    summary_line,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

Notices = list[dict[str, str]]
Writer = Callable[..., None]
STYLES = {RowLevel.GOOD: "", RowLevel.SUSPECT: "yellow", RowLevel.BAD: "bold red"}
LINES_AROUND_ROWS = 4
"""Lines besides the table's rows: the summary, the heading, an empty line, and the line of the
cursor."""
HELP = """\
usage: drumline watch RUN [--once [--running]] [--every S] [--json]

Shows the status of the job that trains in the run folder RUN, from another terminal or another machine that sees the
folder. It only reads and does not affect the job. A row for each rank:

  host, rank   where it runs
  step         how many optimizer steps it has done
  phase        data, forward, backward, optimizer, between (steps), compile, evaluation, save; user: in a loop of your
               own
  for          how long it has been in this phase
  steps/s      over the last 10 seconds
  state        trains, waits for others, stopped by a signal, no heartbeat for 5 s, ...

Yellow ranks keep the others waiting, red ones cannot continue by themselves. Below are the watchdog's notices (stall,
straggler, hang). With many ranks those that need attention are shown, and the rest by host. It exits when the run ends.
"""
EXIT_CODES = """\
exit codes: 0 all is well, or the run has ended; 1 no job trains there, or, with --once, a rank needs attention or the
            status is old; 2 no such run folder
"""
OWN_FLAGS: FlagTable = {
    "once": switch("Show all ranks once; the exit code says whether all is well."),
    "running": switch("With --once: a run that has ended is not well, either: for probes."),
    "every": (
        Annotated[float, Bounds(low=0.1, high=86_400)],
        "S",
        "Seconds between two updates [1 on a terminal, else 10: then a line each, and ranks that need attention].",
    ),
    "json": switch(
        "For scripts: the record and each rank's state in words; without --once one line for each update."
    ),
    **HELP_FLAG,
}


def run(argv: Sequence[str]) -> int:
    """Show the status once, or until the run ends."""
    flags = read_command("watch", argv, {"": OWN_FLAGS}, HELP, ends_with=EXIT_CODES)
    check_run_is_named("watch", flags)
    verb_flags = flags.values
    folder = Path(flags.positional[0])
    if not (folder / STATUS_FILE).is_file():
        folder = find_run(folder)

    reader = RunStatusReader(folder)
    write = _write_json if verb_flags.json else _write_text
    if verb_flags.once:
        return _show_once(reader.read(), write, must_run=bool(verb_flags.running))

    is_screen = sys.stdout.isatty() and not verb_flags.json
    every_s = verb_flags.get("every", 1.0 if is_screen else 10.0)
    if is_screen:
        return follow_on_screen(reader, every_s)
    return _follow(reader, every_s, write)


def _show_once(run: RunStatus, write: Writer, *, must_run: bool) -> int:
    write(run, _notices(run), is_once=True)
    if run.has_ended and not must_run:
        return _final_code(run)
    is_well = run.is_live and not any(row.level for row in all_rows(run.status or {}))
    return ExitCode.SUCCESS if is_well else ExitCode.SOMETHING_WRONG


def _notices(run: RunStatus) -> Notices:
    notices: Notices = (run.status or {}).get("notices", [])
    return notices


def _final_code(run: RunStatus) -> int:
    return ExitCode.SOMETHING_WRONG if run.is_unknown else ExitCode.SUCCESS


def _follow(reader: RunStatusReader, every_s: float, write: Writer) -> int:
    """Without a terminal: lines, until the run ends or nobody reads."""
    shown: Notices = []
    while True:
        run = reader.read()
        new = [notice for notice in _notices(run) if notice not in shown]
        shown += new
        write(run, new, is_once=False)
        if run.has_ended:
            return _final_code(run)
        if not is_read():
            return ExitCode.SUCCESS
        time.sleep(every_s)


def _write_json(run: RunStatus, notices: Notices, *, is_once: bool) -> None:
    """One line for each update."""
    rows = [] if run.status is None else all_rows(run.status)
    record = {
        "age_s": round(run.age_s, 1),
        "message": run.message(),
        "has_ended": run.has_ended,
        "status": run.status,
        "rows": rows,
    }
    show_json(record)


def _write_text(run: RunStatus, notices: Notices, *, is_once: bool) -> None:
    """All ranks at once, or those that need attention."""
    lines: list[str] = []
    if run.status is not None:
        rows = all_rows(run.status)
        if is_once:
            lines += [summary_line(run.status), *table(rows)]
        elif not run.has_ended:
            suspects = [row for row in rows if row.level > RowLevel.GOOD]
            lines += [summary_line(run.status), *table(suspects)[1:]]

    lines += [notice["message"] for notice in notices]
    if message := run.message():
        lines.append(message)
    if not is_once and lines:
        lines[0] = f"{time.strftime('%H:%M:%S')} {lines[0]}"

    show_lines(lines)


def table(rows: Sequence[StatusRow]) -> list[str]:
    """The table as lines, with its heading; as wide as its values need."""
    return [f"  {line}" for line in columns([row.cells for row in (HEADINGS, *rows)])]


def follow_on_screen(reader: RunStatusReader, every_s: float) -> int:
    """On a terminal: a table that is drawn again at each update, and stays when the run has
    ended."""
    from rich.live import Live  # the other outputs do not need rich

    console = make_console()
    with Live(console=console, auto_refresh=False) as live:
        while True:
            run = reader.read()
            live.update(render(run, width=console.width, height=console.height), refresh=True)
            if run.has_ended:
                return _final_code(run)
            time.sleep(every_s)


def render(run: RunStatus, *, width: int, height: int) -> RenderableType:
    """Never higher than the terminal: what does not fit could not be drawn over at the next
    update."""
    from rich.console import Group
    from rich.text import Text

    below = []
    for notice in _notices(run):
        style = "bold red" if notice["kind"] in FATAL_NOTICES else "yellow"
        below.append(Text(one_line(notice["message"]), style))
    if message := run.message():
        below.append(Text(one_line(message), "" if run.has_ended else "yellow"))
    if run.status is None:
        return Group(*below)

    def num_lines() -> int:  # at least
        return sum(len(text.plain) // max(1, width - 10) + 1 for text in below)

    # The newest notices; the table keeps half of the screen at least.
    while below and num_lines() > max(1, height // 2 - 1):
        del below[0]
    max_rows = max(1, height - LINES_AROUND_ROWS - num_lines())
    rows = fitting_rows(run.status, max_rows=max_rows)

    styles = ["dim", *(STYLES[row.level] for row in rows)]
    lines = [
        Text(line, style, no_wrap=True, overflow="ellipsis")
        for line, style in zip(table(rows), styles, strict=True)
    ]
    return Group(Text(one_line(summary_line(run.status)), "bold"), *lines, Text(), *below)

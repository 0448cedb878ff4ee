"""`drumline watch RUN`: the status of a running job, from another terminal: a row for each rank, as it changes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from drumline import terminal
from drumline.audit.verify import find_run
from drumline.cli.watch_status import RunStatus, RunStatusReader
from drumline.config import FlagTable, read_flags
from drumline.config.schema import Bounds
from drumline.errors import ConfigError, ExitCode, UsageError
from drumline.watch.status_file import STATUS_FILE
from drumline.watch.status_table import HEADINGS, RowLevel, StatusRow, all_rows, summary_line

HELP = """\
usage: drumline watch RUN [--once] [--every S] [--json]

Shows the status of the job that trains in the run folder RUN, from another terminal or another machine that sees the
folder. It only reads and does not affect the job. A row for each rank:

  host, rank   where it runs
  step         how many it has done
  phase        data, forward, backward, optimizer, between (steps), evaluation, save; user: in a loop of your own
  for          how long it has been in this phase
  steps/s      over the last 10 seconds
  state        trains, waits for others, stopped by a signal, no heartbeat for 5 s, ...

Yellow ranks keep the others waiting, red ones cannot continue by themselves. Below are the watchdog's notices (stall,
straggler, hang). Of many ranks those that matter are shown, and the rest by host. It exits when the run ends.

  --once      show all ranks once; the exit code says whether all is well
  --every S   seconds between two updates [1 on a terminal, else 10: then a line each, and ranks that need attention]
  --json      for scripts: the record and each rank's state in words; without --once one line for each update
  --help      this text

exit codes: 0 all is well, or the run has ended; 1 no job trains there, or, with --once, a rank needs attention or the
            status is old; 2 no such run folder
"""
OWN_FLAGS: FlagTable = {
    "once": (bool, "", ""),
    "every": (Annotated[float, Bounds(low=0.1, high=86_400)], "", ""),
    "json": (bool, "", ""),
    "help": (bool, "", ""),
}


def run(argv: Sequence[str]) -> int:
    """The verb."""
    flags = read_flags(argv, OWN_FLAGS, max_positional=len(argv), no_settings="is a setting of a run; watch takes none")
    given, runs = flags.own, flags.positional
    if given.get("help"):
        terminal.show(HELP, end="")
        return ExitCode.SUCCESS
    if flags.layer.problems:
        raise ConfigError(flags.layer.problems, next_step="see drumline watch --help")
    if len(runs) != 1:
        what = "no RUN was given" if not runs else f"{len(runs)} runs were given, but one is watched at a time"
        raise UsageError(what, next_step="give a run folder, as in: drumline watch runs/digits")
    folder = Path(runs[0])
    if not (folder / STATUS_FILE).is_file():
        folder = find_run(folder)
    reader, as_json = RunStatusReader(folder), given.get("json", False)
    show = _show_json if as_json else _show_text
    if given.get("once"):
        return _once(reader.read(), show)
    is_screen = sys.stdout.isatty() and not as_json
    every_s = given.get("every", 1.0 if is_screen else 10.0)
    if is_screen:
        from drumline.cli.watch_screen import follow_on_screen

        return follow_on_screen(reader, every_s)
    return _follow(reader, every_s, show)


def _once(run: RunStatus, show: Any) -> int:
    show(run, is_whole=True)
    if run.has_ended:
        return _final_code(run)
    is_well = run.is_live and not any(row.level for row in all_rows(run.status or {}))
    return ExitCode.SUCCESS if is_well else ExitCode.SOMETHING_WRONG


def _final_code(run: RunStatus) -> int:
    return ExitCode.SOMETHING_WRONG if run.is_unknown else ExitCode.SUCCESS


def _follow(reader: RunStatusReader, every_s: float, show: Any) -> int:
    shown: list[dict[str, str]] = []
    while True:
        run = reader.read()
        new = [notice for notice in (run.status or {}).get("notices", []) if notice not in shown]
        shown += new
        show(run, is_whole=False, notices=new)
        if run.has_ended:
            return _final_code(run)
        if not terminal.is_read():
            return ExitCode.SUCCESS
        time.sleep(every_s)


def _show_json(run: RunStatus, **_: Any) -> None:
    rows = [] if run.status is None else [asdict(row) for row in all_rows(run.status)]
    record = {"age_s": round(run.age_s, 1), "trouble": run.problem(), "has_ended": run.has_ended}
    terminal.show(json.dumps({**record, "status": run.status, "rows": rows}))


def _show_text(run: RunStatus, *, is_whole: bool, notices: Sequence[dict[str, str]] | None = None) -> None:
    lines: list[str] = []
    if run.status is not None:
        rows = all_rows(run.status)
        if is_whole:
            lines += [summary_line(run.status), *table(rows)]
        elif not run.has_ended:
            lines += [summary_line(run.status), *table([row for row in rows if row.level > RowLevel.GOOD])[1:]]
        shown = run.status["notices"] if notices is None else notices
        lines += [notice["message"] for notice in shown]
    if problem := run.problem():
        lines.append(problem)
    if not is_whole and lines:
        lines[0] = f"{time.strftime('%H:%M:%S')} {lines[0]}"
    terminal.show_lines(lines)


def table(rows: Sequence[StatusRow]) -> list[str]:
    """With its heading; as wide as it needs to be."""
    grid = [row.cells for row in (HEADINGS, *rows)]
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in grid
    ]

"""`drumline watch` on a terminal: a table that is drawn again at each update, and stays when the run has ended."""

from __future__ import annotations

import time

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from drumline.cli.watch_status import FATAL_NOTICES, RunStatus, RunStatusReader
from drumline.errors import ExitCode
from drumline.terminal import make_console, one_line
from drumline.watch.status_table import HEADINGS, RowLevel, StatusRow, fitting_rows, summary_line

STYLES = {RowLevel.GOOD: "", RowLevel.SUSPECT: "yellow", RowLevel.BAD: "bold red"}
_OF_TABLE = 4
"""Lines around its rows: the summary, the heading, one empty, and the one where the cursor waits."""


def follow_on_screen(reader: RunStatusReader, every_s: float, console: Console | None = None) -> int:
    """Until the run ends."""
    console = console or make_console()
    with Live(console=console, auto_refresh=False) as live:
        while True:
            run = reader.read()
            live.update(render(run, width=console.width, height=console.height), refresh=True)
            if run.has_ended:
                return ExitCode.SOMETHING_WRONG if run.is_unknown else ExitCode.SUCCESS
            time.sleep(every_s)


def render(run: RunStatus, *, width: int, height: int) -> RenderableType:
    """Never higher than the terminal: what does not fit could not be drawn over at the next update."""
    problem = run.problem()
    below = [] if problem is None else [Text(one_line(problem), "" if run.has_ended else "yellow")]
    if run.status is None:
        return Group(*below)
    # The newest notices; the table keeps half of the screen at least.
    below = [*map(_notice_text, run.status["notices"]), *below]
    while below and _lines(below, width) > max(1, height // 2 - 1):
        del below[0]
    rows = fitting_rows(run.status, room=max(1, height - _OF_TABLE - _lines(below, width)))
    return Group(Text(one_line(summary_line(run.status)), "bold"), _table(rows), Text(), *below)


def _table(rows: list[StatusRow]) -> Table:
    table = Table.grid(padding=(0, 2))
    for number, _ in enumerate(HEADINGS.cells):
        table.add_column(no_wrap=True, overflow="ellipsis", justify="right" if number in (2, 4, 5) else "left")
    table.add_row(*HEADINGS.cells, style="dim")
    for row in rows:
        table.add_row(*map(Text, row.cells), style=STYLES[row.level])
    return table


def _notice_text(notice: dict[str, str]) -> Text:
    return Text(one_line(notice["message"]), "bold red" if notice["kind"] in FATAL_NOTICES else "yellow")


def _lines(texts: list[Text], width: int) -> int:
    """How many lines they take, at least."""
    return sum(len(text.plain) // max(1, width - 10) + 1 for text in texts)

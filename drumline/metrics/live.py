"""The live display: a progress bar and the newest numbers at the bottom of the terminal, other
lines above them.

The thread that reports an event draws it: there is no refresh thread.
"""

from __future__ import annotations

from typing import TextIO

from rich.console import Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from drumline.base.errors import as_lines
from drumline.base.text import clock, make_console, one_line
from drumline.metrics import display
from drumline.metrics.display import Display, Page
from drumline.runs.events import Event

_SECONDS_BETWEEN_DRAWS = 0.1
_MARGIN = " "
_STYLES = {
    "resume": "cyan",
    "recovered": "cyan",
    "first_step": "dim",
    "warning": "yellow",
    "straggler": "yellow",
    "stall": "yellow",
    "preempted": "yellow",
}


class LiveDisplay(Display):
    """Draws on a terminal; other output appears above the bar."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._train: Event | None = None
        """The newest one, which the bar shows."""

        self._saved_step: int | None = None
        """Of the newest checkpoint."""

        self._last_draw = float("-inf")
        """By the time of the events."""

        self._console = make_console(stream, force_terminal=True)
        self._live = Live(console=self._console, auto_refresh=False, get_renderable=self._bottom)
        """What Rich keeps at the bottom of the terminal."""

    @property
    def can_animate(self) -> bool:
        """Whether the terminal can move its cursor."""
        return not self._console.is_dumb_terminal

    def close(self) -> None:
        """The bar stays as it is."""
        self._live.stop()

    def show_train(self, event: Event) -> None:
        """Draw the bar again, at most ten times a second."""
        self._train = event
        if not self._live.is_started:
            self._live.start()
            # Rich hides the cursor, and a rank that is killed could not show it again.
            self._console.show_cursor(True)

        if event["time"] - self._last_draw >= _SECONDS_BETWEEN_DRAWS:
            self._last_draw = event["time"]
            self._live.refresh()

    def show_evaluation(self, event: Event) -> None:
        """Above the bar."""
        line = Text(display.evaluation_line(event, self.epochs))
        line.highlight_regex(r"\b[a-z]\w*", "dim")  # the names of the numbers
        self._print(line)

    def show_checkpoint(self, event: Event) -> None:
        """Beside the bar, from the next step on."""
        self._saved_step = event["step"]

    def show_error(self, event: Event) -> None:
        """The error itself is printed below the bar."""
        self.close()

    def show_line(self, event: Event, line: str) -> None:
        """Above the bar, in the colour of its kind."""
        kind = event["kind"]
        if kind == "preempted":
            self.close()
        self._print(Text(line, _STYLES.get(kind, "")))

    def _print(self, line: Text) -> None:
        """Above the bar, or below the last line when it is gone."""
        line.plain = "\n  ".join(as_lines(line.plain))
        self._console.print(Padding(line, (0, 0, 0, len(_MARGIN)), expand=False))

    def show_page(self, event: Event, page: Page) -> None:
        """With space around it, and commands that can be copied as a line."""
        is_end = event["kind"] == "end"
        if is_end:
            self._live.transient = True  # the summary replaces the bar
            self.close()

        self._console.print()
        self._print(Text(page.heading, "bold green" if is_end else "bold cyan"))
        self._console.print()

        table = Table.grid(padding=(0, 2))
        for label, value in page.rows:
            table.add_row(Text(f"{_MARGIN}  {one_line(label):<10}", "dim"), one_line(value))
        self._console.print(table)

        for label, command in page.commands.items():
            self._console.print()
            self._print(Text(f"  {label}", "dim"))
            self._console.print(Text(f"{_MARGIN}    {command}", "cyan"), soft_wrap=True)

        self._console.print()

    def _bottom(self) -> RenderableType:
        """What is below all other lines: the bar, and the newest numbers."""
        event = self._train
        if event is None:
            return Text()

        # The last line is empty and has the cursor, so that the output of another rank starts on a
        # new line.
        return Group(Text(), self._bar(event), self._numbers(event), Text())

    def _bar(self, event: Event) -> Table:
        """`epoch 1/3 ------- step 23/69  0:12 left`."""
        epoch = display.epoch_of(event, self.epochs)
        step = display.step_of(event, self.total_steps)
        progress = ProgressBar(
            self.total_steps,
            event["step"],
            complete_style="cyan",
            finished_style="cyan",
        )

        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_row(_MARGIN + epoch, progress, f"{step}  {clock(event['seconds_left'])} left")
        return bar

    def _numbers(self, event: Event) -> Text:
        """`loss 0.5000   lr 0.0983   8,123 samples/s   saved step 20`, in one line."""
        parts = [*display.metric_parts(event), *display.rates(event)]
        if self._saved_step is not None:
            parts.append(f"saved step {self._saved_step}")
        line = one_line(_MARGIN + "   ".join(parts))
        return Text(line, "dim", no_wrap=True, overflow="ellipsis")

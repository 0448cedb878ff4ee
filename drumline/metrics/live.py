"""The live display: a bar and the newest numbers at the bottom of the terminal, and what is worth keeping above them.

It is drawn when an event comes, by the thread that reports it: no thread of its own ticks beside the training.
"""

from __future__ import annotations

from typing import TextIO

from rich.console import Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from drumline.errors import as_lines
from drumline.metrics import wording
from drumline.metrics.display import Display
from drumline.metrics.events import Event
from drumline.terminal import make_console, one_line
from drumline.text import clock

_SECONDS_BETWEEN_DRAWS = 0.1
_MARGIN = " "


class LiveDisplay(Display):
    """Draws on a terminal; whatever else prints meanwhile appears above the bar."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._console = make_console(stream, force_terminal=True)
        self._train: Event | None = None
        self._saved_step: int | None = None
        self._last_draw = float("-inf")
        self._live = Live(console=self._console, auto_refresh=False, get_renderable=self._bottom)

    @property
    def can_animate(self) -> bool:
        """Whether the terminal can move its cursor."""
        return not self._console.is_dumb_terminal

    def close(self) -> None:
        self._live.stop()

    def show_start(self, event: Event) -> None:
        self._print_page(wording.opening(event), "bold cyan")

    def show_resume(self, event: Event) -> None:
        self._print(Text(f"resumed at step {event['step']} from {event['path']}", "cyan"))

    def show_recovered(self, event: Event) -> None:
        self._print(Text(wording.recovered_line(event), "cyan"))

    def show_first_step(self, event: Event) -> None:
        self._print(Text(wording.first_step_line(event), "dim"))

    def show_train(self, event: Event) -> None:
        self._train = event
        if not self._live.is_started:
            self._live.start()
            # Rich hides the cursor, and a rank that is killed could not bring it back.
            self._console.show_cursor(True)
        if event["time"] - self._last_draw >= _SECONDS_BETWEEN_DRAWS:
            self._last_draw = event["time"]
            self._live.refresh()

    def show_evaluation(self, event: Event) -> None:
        self._print(_labelled(wording.evaluation_line(event, self.epochs)))

    def show_checkpoint(self, event: Event) -> None:
        self._saved_step = event["step"]

    def show_note(self, event: Event) -> None:
        self._print(Text(event["message"]))

    def show_warning(self, event: Event) -> None:
        self._print(Text(f"warning: {event['message']}", "yellow"))

    def show_straggler(self, event: Event) -> None:
        self._print(Text(event["message"], "yellow"))

    def show_stall(self, event: Event) -> None:
        self._print(Text(event["message"], "yellow"))

    def show_error(self, event: Event) -> None:
        self.close()  # the error is printed below the bar, where the run stood

    def show_preempted(self, event: Event) -> None:
        self.close()
        self._print(Text(wording.preempted_line(event), "yellow"))

    def show_end(self, event: Event) -> None:
        self._live.transient = True  # the summary takes the bar's place
        self.close()
        self._print_page(wording.closing(event), "bold green")

    def _print(self, line: Text) -> None:
        line.plain = "\n  ".join(as_lines(line.plain))
        self._console.print(Padding(line, (0, 0, 0, len(_MARGIN)), expand=False))

    def _print_page(self, page: wording.Page, style: str) -> None:
        self._console.print()
        self._print(Text(page.heading, style))
        self._console.print()
        table = Table.grid(padding=(0, 2))
        for label, value in page.rows:
            table.add_row(Text(f"{_MARGIN}  {one_line(label):<10}", "dim"), one_line(value))
        self._console.print(table)
        for label, command in page.commands:
            self._console.print()
            self._print(Text(f"  {label}", "dim"))
            for line in wording.wrap_command(command, width=self._console.width, indent=f"{_MARGIN}    "):
                self._console.print(Text(line, "cyan"), soft_wrap=True)
        self._console.print()

    def _bottom(self) -> RenderableType:
        event = self._train
        if event is None:
            return Text()
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_row(
            _MARGIN + wording.epoch_of(event, self.epochs),
            ProgressBar(
                total=self.total_steps,
                completed=event["step"],
                complete_style="cyan",
                finished_style="cyan",
            ),
            f"{wording.step_of(event, self.total_steps)}  {clock(event['seconds_left'])} left",
        )
        # The last line is empty: there the cursor waits, and whatever another rank may print starts at its beginning.
        return Group(Text(), bar, self._numbers(event), Text())

    def _numbers(self, event: Event) -> Text:
        parts = [f"{name} {wording.metric(name, value)}" for name, value in wording.metrics_of(event).items()]
        parts += [f"lr {wording.learning_rate(event['lr'])}", wording.speed(event["samples_per_s"])]
        parts += wording.waiting(event)
        if self._saved_step is not None:
            parts.append(f"saved step {self._saved_step}")
        return Text(one_line(_MARGIN + "   ".join(parts)), "dim", no_wrap=True, overflow="ellipsis")


def _labelled(words: str) -> Text:
    """The names of the numbers dim, the numbers plain."""
    text = Text(words)
    text.highlight_regex(r"\b[a-z]\w*", "dim")
    return text

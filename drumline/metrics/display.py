"""The display of rank 0: live on a terminal, plain lines elsewhere, or none. It shows no errors."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self, TextIO

from drumline.errors import as_lines
from drumline.metrics import wording
from drumline.metrics.events import Event
from drumline.terminal import show_lines
from drumline.text import clock

_LABEL_WIDTH = 12


class Display:
    """Shows nothing; the others build on it."""

    def __init__(self) -> None:
        self.epochs: int | None = None
        self.total_steps = 0

    def __call__(self, event: Event) -> None:
        """Show one event, by the method that is named after its kind."""
        if event["kind"] == "start":
            self.epochs, self.total_steps = event["epochs"], event["total_steps"]
        show = getattr(self, f"show_{event['kind']}", None)
        if show is not None:
            show(event)

    def close(self) -> None:
        """Leave the terminal as it was found; what is on the screen stays there."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class PlainDisplay(Display):
    """Lines for log files and pipes; the steps speak at most every few seconds."""

    def __init__(self, stream: TextIO, *, seconds_between_steps: float = 5.0) -> None:
        super().__init__()
        self._stream = stream
        self._seconds_between_steps = seconds_between_steps
        self._last_train_time = float("-inf")

    def show_start(self, event: Event) -> None:
        self._print_page(wording.opening(event))

    def show_resume(self, event: Event) -> None:
        self._print_line(event, f"resumed at step {event['step']} from {event['path']}")

    def show_recovered(self, event: Event) -> None:
        self._print_line(event, wording.recovered_line(event))

    def show_first_step(self, event: Event) -> None:
        self._print_line(event, wording.first_step_line(event))

    def show_train(self, event: Event) -> None:
        if event["time"] - self._last_train_time < self._seconds_between_steps:
            return
        self._last_train_time = event["time"]
        parts = [
            wording.step_of(event, self.total_steps),
            f"loss {wording.number(event['loss'])}",
            f"lr {wording.learning_rate(event['lr'])}",
            wording.speed(event["samples_per_s"]),
            *wording.waiting(event),
            f"{clock(event['seconds_left'])} left",
        ]
        self._print_line(event, "   ".join(parts))

    def show_evaluation(self, event: Event) -> None:
        self._print_line(event, wording.evaluation_line(event, self.epochs))

    def show_checkpoint(self, event: Event) -> None:
        self._print_line(event, wording.checkpoint_line(event))

    def show_note(self, event: Event) -> None:
        self._print_line(event, event["message"])

    show_straggler = show_stall = show_note

    def show_warning(self, event: Event) -> None:
        self._print_line(event, f"warning: {event['message']}")

    def show_preempted(self, event: Event) -> None:
        self._print_line(event, wording.preempted_line(event))

    def show_end(self, event: Event) -> None:
        self._print_page(wording.closing(event))

    def _print_line(self, event: Event, words: str) -> None:
        clock = time.strftime("%H:%M:%S", time.localtime(event["time"]))
        first, *more = as_lines(words)
        show_lines([f"{clock} {first}", *(f"  {line}" for line in more)], stream=self._stream)

    def _print_page(self, page: wording.Page) -> None:
        lines = [page.heading, *(f"  {label:<{_LABEL_WIDTH}} {value}" for label, value in page.rows)]
        for label, command in page.commands:
            lines += [f"  {label}", *wording.wrap_command(command, width=80, indent="    ")]
        show_lines(lines, stream=self._stream)

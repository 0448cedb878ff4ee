"""The display of rank 0: live on a terminal, plain lines elsewhere, or none. It shows no errors."""

from __future__ import annotations

import time
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
        """Show one event: by the method named after its kind if there is one, else as a line."""
        if event["kind"] == "start":
            self.epochs, self.total_steps = event["epochs"], event["total_steps"]
        if (show := getattr(self, f"show_{event['kind']}", None)) is not None:
            show(event)
        elif (words := wording.line(event)) is not None:
            self.show_line(event, words)

    def show_line(self, event: Event, words: str) -> None:
        pass

    def close(self) -> None:
        """Leave the terminal as it was found; what is on the screen stays there."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PlainDisplay(Display):
    """Lines for log files and pipes; steps are shown at most every few seconds."""

    def __init__(self, stream: TextIO, *, seconds_between_steps: float = 5.0) -> None:
        super().__init__()
        self._stream = stream
        self._seconds_between_steps = seconds_between_steps
        self._last_train_time = float("-inf")

    def show_start(self, event: Event) -> None:
        self._show_page(wording.opening(event))

    def show_train(self, event: Event) -> None:
        if event["time"] - self._last_train_time < self._seconds_between_steps:
            return
        self._last_train_time = event["time"]
        parts = [
            wording.step_of(event, self.total_steps),
            f"loss {wording.number(event['loss'])}",
            *wording.rates(event),
            f"{clock(event['seconds_left'])} left",
        ]
        self.show_line(event, "   ".join(parts))

    def show_evaluation(self, event: Event) -> None:
        self.show_line(event, wording.evaluation_line(event, self.epochs))

    def show_end(self, event: Event) -> None:
        self._show_page(wording.closing(event))

    def show_line(self, event: Event, words: str) -> None:
        now = time.strftime("%H:%M:%S", time.localtime(event["time"]))
        first, *more = as_lines(words)
        show_lines([f"{now} {first}", *(f"  {line}" for line in more)], stream=self._stream)

    def _show_page(self, page: wording.Page) -> None:
        lines = [page.heading, *(f"  {label:<{_LABEL_WIDTH}} {value}" for label, value in page.rows)]
        for label, command in page.commands:
            lines += [f"  {label}", *wording.wrap_command(command, width=80, indent="    ")]
        show_lines(lines, stream=self._stream)

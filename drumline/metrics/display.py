"""The display of rank 0, one of the sinks of the events: live on a terminal, plain lines elsewhere, or none."""

from __future__ import annotations

from typing import Literal, TextIO

from drumline.metrics.plain import Display, PlainDisplay

Mode = Literal["auto", "live", "plain", "none"]


def make_display(mode: Mode, stream: TextIO) -> Display:
    """The display for a stream; `auto` is live on a terminal that can move its cursor, and plain elsewhere."""
    if mode == "none":
        return Display()
    if mode == "plain" or (mode == "auto" and not stream.isatty()):
        return PlainDisplay(stream)
    from drumline.metrics.live import LiveDisplay  # the plain display does without rich

    live = LiveDisplay(stream)
    return live if mode == "live" or live.can_animate else PlainDisplay(stream)

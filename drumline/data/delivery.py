"""From answers on the host to batches on the device; on a GPU ahead of the step that needs them.

On a GPU two batches are kept ahead: their copies and what is left to do on the device (`finish`) run on a stream of
their own, beside the step. There is no thread: the next batch is asked for when one is handed out, while the device is
still busy with the step before. On the CPU nothing is made ahead and nothing is copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from drumline.data.transfer import can_change_streams, record_stream, to_device

NUM_AHEAD = 2


class _Sent(NamedTuple):
    """A batch on its way."""

    batch: Any
    is_there: torch.cuda.Event | None
    """None: it has not left the host."""


class Delivery:
    """Brings batches to one device."""

    def __init__(self, device: torch.device, finish: Callable[[Any], Any]) -> None:
        self._device = device
        self._finish = finish
        self._stream = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def batches(self, answers: Iterator[Any]) -> Iterator[Any]:
        """The batch of each answer, in order. An error comes in place of the batch that it belongs to."""
        if self._stream is None:
            return map(self.now, answers)
        return map(self._receive, kept_ahead(answers, self._send, count=NUM_AHEAD))

    def now(self, answer: Any) -> Any:
        """One batch, beside the others."""
        return self._finish(to_device(answer, self._device))

    def _send(self, answer: Any) -> _Sent:
        if self._stream is None or not can_change_streams(answer):
            return _Sent(answer, None)
        with torch.cuda.stream(self._stream):
            batch = self.now(answer)
            if can_change_streams(batch):
                return _Sent(batch, self._stream.record_event())
        return _Sent(answer, None)  # what `finish` makes must be made on the stream that uses it

    def _receive(self, sent: _Sent) -> Any:
        if sent.is_there is None:
            return self.now(sent.batch)
        current = torch.cuda.current_stream(self._device)
        current.wait_event(sent.is_there)
        # The memory belongs to the other stream, which must not have it back before this one is done with it.
        record_stream(sent.batch, current)
        return sent.batch


def kept_ahead(answers: Iterator[Any], send: Callable[[Any], Any], *, count: int) -> Iterator[Any]:
    """What `send` makes of each answer, made while the `count` before it are still to be handed out. An error ends the
    sequence, and comes when its own turn comes."""
    waiting: deque[Any] = deque()
    error: Exception | None = None
    is_over = False
    while True:
        while not is_over and len(waiting) <= count:
            try:
                waiting.append(send(next(answers)))
            except StopIteration:
                is_over = True
            except Exception as caught:
                error, is_over = caught, True
        if not waiting:
            break
        yield waiting.popleft()
    if error is not None:
        raise error

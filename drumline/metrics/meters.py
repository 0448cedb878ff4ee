"""Meters: the sums behind a logged loss, kept on the device.

The engine adds to a `Meter` at every micro-batch, without waiting for the device. To log, it takes
the sums, adds them up over the ranks and only then copies them to the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from drumline.base.errors import TrainingError
from drumline.runs.events import RESERVED


class SavedSums(NamedTuple):
    """The sums of a checkpoint, and the names of their metrics."""

    names: tuple[str, ...]
    """Without the loss and the weight."""

    sums: Sequence[float]
    """As `Meter.peek` returns them."""


class Meter:
    """Sums of the loss, of its weight and of named metrics, on the device."""

    def __init__(self, device: torch.device) -> None:
        # Double precision, so that the sum of a long epoch is exact enough.
        self.dtype = torch.float64
        self._device = device
        """Where the sums are."""

        self._names: tuple[str, ...] | None = None
        """In the order of the sums; None: not known yet."""

        self.host_weight = 0.0
        """The part of the weight that is counted on the host; the rest is on the device."""

        self._saved: SavedSums | None = None
        """What `put` was given, until the names of the metrics are known."""

        self._lay_out(())

    @property
    def names(self) -> tuple[str, ...]:
        """Of the metrics; empty while they are not known."""
        return self._names or ()

    def prepare(self, names: Iterable[str]) -> None:
        """Set the names of the metrics before the first `add`, or without one (on a rank without
        samples)."""
        metrics = tuple(sorted(names))
        if self._names == metrics:
            return
        if self._names is not None:
            raise TrainingError(
                f"the metrics of the loss changed: {list(self._names)} -> {list(metrics)}",
                next_step="return the same metrics with every Loss",
            )

        check_names(metrics)
        self._names = metrics
        self._lay_out(metrics)
        if self._saved is not None and self._saved.names == metrics:
            self._sums.copy_(torch.tensor(self._saved.sums, dtype=self.dtype))

    def add(
        self, loss_total: Tensor, weight: Tensor | float, metrics: Mapping[str, Tensor]
    ) -> None:
        """Add the sums of one micro-batch, without waiting for the device."""
        if self._names is None or metrics.keys() != self._metrics.keys():
            self.prepare(metrics)

        self.loss.add_(loss_total.detach())
        if isinstance(weight, Tensor):
            self._weight.add_(weight.detach())
        else:
            self.host_weight += weight

        for name, total in metrics.items():
            self._metrics[name].add_(total.detach())

    def take(self) -> Tensor:
        """The sums since the last `take`, in a tensor of [loss, weight, *metrics], still on the
        device."""
        self._weight.add_(self.host_weight)
        self.host_weight = 0.0

        sums = self._sums.clone()
        self._sums.zero_()
        return sums

    def peek(self) -> Tensor:
        """The same sums, without resetting them: for a checkpoint."""
        sums = self._sums.clone()
        sums[1] += self.host_weight
        return sums

    def put(self, sums: Sequence[float], names: Sequence[str]) -> None:
        """Continue with saved sums, on one of the ranks: the next log line then includes them. They
        are dropped if the metrics differ, or if they are not finite."""
        if all(map(math.isfinite, sums)):
            self._saved = SavedSums(tuple(names), sums)

    def keep(self) -> Tensor:
        """A copy of what is on the device, for `put_back_if`."""
        return self._sums.clone()

    def put_back_if(self, condition: Tensor, sums: Tensor) -> None:
        """Undo what was added since `keep`, if the condition on the device is true, without waiting
        for it."""
        self._sums.copy_(torch.where(condition, sums, self._sums))

    def put_back(self, sums: Tensor, host_weight: float) -> None:
        """Undo what was added since `keep`. If the names of the metrics were not known then, all of
        it is dropped."""
        if sums.shape == self._sums.shape:
            self._sums.copy_(sums)
        else:
            self._sums.zero_()
        self.host_weight = host_weight

    def _lay_out(self, names: Sequence[str]) -> None:
        """New sums, all 0: of the loss, the weight and these metrics."""
        self._sums = torch.zeros(2 + len(names), dtype=self.dtype, device=self._device)

        # Views made once: adding to one of them is a single operation on the device.
        self.loss, self._weight, *metrics = self._sums.unbind()
        self._metrics = dict(zip(names, metrics, strict=True))


def check_names(names: Iterable[str]) -> None:
    """Refuse metrics with a reserved name."""
    for name in names:
        if name in RESERVED:
            raise TrainingError(
                f"the metric name {name!r} is reserved: every event has a field of that name",
                next_step=f"rename the metric; reserved names: {', '.join(sorted(RESERVED))}",
            )


def means(sums: Sequence[float], names: Iterable[str]) -> dict[str, float]:
    """The loss and the metrics per unit of weight, from the numbers of `Meter.take`, summed over
    ranks or not."""
    loss, weight, *metrics = sums
    if weight == 0:
        raise TrainingError(
            "there is no mean loss: the weights of the samples add up to 0",
            next_step="check the weight of the task's Loss, and that the dataset is not empty",
        )

    totals = {"loss": loss, **dict(zip(names, metrics, strict=True))}
    return {name: total / weight for name, total in totals.items()}

"""What every kind of step is to the loop."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from drumline.data.steps import Step


class AnyStep(Protocol):
    """Something that takes optimizer steps."""

    grad_norm: Tensor | None
    """Of the latest step, before clipping; on the device."""

    def __call__(self, step: Step) -> None:
        """Collective: one optimizer step."""

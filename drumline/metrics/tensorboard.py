"""TensorBoard as a sink for the numbers of `train` and `evaluation` events.

It is an extra: the package is imported only when a run asks for it.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drumline.errors import MissingExtraError
from drumline.metrics.events import STAMP, Event

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """Writes to a folder; after a resume, the points of steps that are repeated are hidden."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            with warnings.catch_warnings():
                # Warnings of TensorBoard's own imports do not help the user.
                warnings.simplefilter("ignore")
                from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtraError("--log.tensorboard", extra="tensorboard") from error
        self._writer_class: Any = SummaryWriter
        self._writer: SummaryWriter | None = None
        self._purge_step: int | None = None

    def __call__(self, event: Event) -> None:
        if event["kind"] == "resume":
            self._purge_step = event["step"] + 1
        if event["kind"] not in ("train", "evaluation"):
            return
        if self._writer is None:
            # Opened with the first number: only then it is known whether the run was resumed.
            self._writer = self._writer_class(str(self._folder), purge_step=self._purge_step)
        for name, value in event.items():
            if name not in STAMP and isinstance(value, int | float):
                self._writer.add_scalar(
                    f"{event['kind']}/{name}", value, global_step=event["step"], walltime=event["time"]
                )
        if event["kind"] == "evaluation":
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

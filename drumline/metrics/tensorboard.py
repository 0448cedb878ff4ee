"""TensorBoard as a sink: the numbers of `train` and `evaluation` events become its curves, and it shows what hooks log.

It is an extra: the package is imported only when a run asks for it.
"""

from __future__ import annotations

import struct
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
        if event["kind"] not in ("train", "evaluation", "logged"):
            return
        if self._writer is None:
            # Opened with the first number: only then it is known whether the run was resumed.
            self._writer = self._writer_class(str(self._folder), purge_step=self._purge_step)
        if event["kind"] == "logged":
            self._add_logged(self._writer, event)
            return
        for name, value in event.items():
            if name not in STAMP and isinstance(value, int | float):
                self._writer.add_scalar(
                    f"{event['kind']}/{name}", value, global_step=event["step"], walltime=event["time"]
                )
        if event["kind"] == "evaluation":
            self._writer.flush()

    def _add_logged(self, writer: Any, event: Event) -> None:
        name, place = event["name"], {"global_step": event["step"], "walltime": event["time"]}
        if event["type"] == "scalar":
            writer.add_scalar(name, event["value"], **place)
        elif event["type"] == "text":
            writer.add_text(name, event["value"], **place)
        else:
            from tensorboard.compat.proto.summary_pb2 import Summary

            png = (self._folder.parent / event["path"]).read_bytes()
            width, height = struct.unpack(">II", png[16:24])
            # As it is: `add_image` would decode and encode it again, with Pillow.
            image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png)
            writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=name, image=image)]), **place)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

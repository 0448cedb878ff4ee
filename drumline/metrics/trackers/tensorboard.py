"""TensorBoard as a tracker: files in the run folder."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drumline.metrics.trackers.tracker import Outcome, Record, load_package


class TensorBoard:
    """Writes to a folder; a resumed run hides what it is about to repeat."""

    name = "tensorboard"
    keeps_past = True

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._folder = folder
        self._config = config
        self._package = load_package("torch.utils.tensorboard", tracker="tensorboard")
        self._writer: Any = None
        """None: `open` was not called."""

    def open(self, run: str, *, resume_step: int) -> str:
        """A run that begins writes its settings as a text."""
        self._writer = self._package.SummaryWriter(str(self._folder), purge_step=resume_step + 1)
        if resume_step == 0:
            lines = [f"    {name} = {value}" for name, value in self._config.items()]
            self._writer.add_text("config", "\n".join(lines), global_step=0)

        return f"tensorboard --logdir {self._folder}"

    def has(self, name: str, step: int) -> bool:
        """What a resumed run repeats was hidden by `open`."""
        return False

    def write(self, records: Sequence[Record]) -> None:
        """What was written survives a kill."""
        for record in records:
            for name, value in record.values.items():
                self._write_value(name, value, global_step=record.step, walltime=record.time)

        self._writer.flush()  # so that a kill loses nothing of it

    def _write_value(self, name: str, value: float | Path | str, **stamp: float) -> None:
        """`stamp`: the step and the time, as TensorBoard calls them."""
        if isinstance(value, Path):
            image = _image_summary(name, value.read_bytes())
            self._writer.file_writer.add_summary(image, **stamp)
        elif isinstance(value, str):
            self._writer.add_text(name, value, **stamp)
        else:
            self._writer.add_scalar(name, value, **stamp)

    def close(self, outcome: Outcome) -> None:
        self._writer.close()


def _image_summary(name: str, png: bytes) -> Any:
    """The file as it is: torch's own `add_image` would need Pillow to encode it again."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    width, height = struct.unpack(">II", png[16:24])
    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png)
    return Summary(value=[Summary.Value(tag=name, image=image)])

"""One rank of `drumline predict`: rank 0 writes the predictions of all ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from drumline.base.terminal import show, show_lines
from drumline.base.text import plural
from drumline.base.untrusted import replacing
from drumline.cli.evaluate_rank import with_saved_run
from drumline.config.flags import Flags
from drumline.training.manager import RunManager
from drumline.training.saved.prediction import as_array, as_lines_of_json, predict_run, write_array
from drumline.training.saved.saved_run import SavedRun


def run_rank(flags: Flags) -> int:
    """Predict as one rank of a group, or alone; returns the exit code."""
    data = flags.positional[1] if len(flags.positional) > 1 else None
    to = Path(flags.values["to"]) if "to" in flags.values else None
    is_array = to is not None and to.suffix == ".npy"

    def work(saved: SavedRun, ddp: RunManager) -> None:
        parts = predict_run(saved, ddp, data, encode=as_array if is_array else as_lines_of_json)
        if not ddp.is_main_process():
            for _ in parts:
                pass
        elif to is None:
            for part in parts:
                show(part.decode(), end="", is_data=True)
        else:
            count = _write(to, parts, is_array=is_array)
            show_lines([f"step {saved.step}: {plural(count, 'prediction')} in {to}"])

    return with_saved_run(flags, work)


def _write(to: Path, parts: Iterator[bytes], *, is_array: bool) -> int:
    """Returns the number of predictions."""
    to.parent.mkdir(parents=True, exist_ok=True)
    with replacing(to) as file:
        count = write_array(file, parts) if is_array else _write_lines(file, parts)
        file.flush()
        os.fsync(file.fileno())
        return count


def _write_lines(file: BinaryIO, parts: Iterator[bytes]) -> int:
    count = 0
    for part in parts:
        file.write(part)
        count += part.count(b"\n")
    return count

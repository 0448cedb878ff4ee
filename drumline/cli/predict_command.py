"""`drumline predict RUN [DATA]`: writes what a checkpoint predicts for every sample of a dataset,
in order."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from drumline.base.errors import UsageError
from drumline.base.rank_environment import topology_from
from drumline.base.text import plural, show, show_lines
from drumline.base.untrusted import replacing
from drumline.cli.command_line import HELP_FLAG, check_new, read_command
from drumline.cli.evaluate_command import (
    CHECKPOINT_FLAG,
    RANK_FLAGS,
    check_run_folder,
    with_saved_run,
)
from drumline.cli.train_command import run_on_ranks
from drumline.config import Flags, FlagTable, switch

if TYPE_CHECKING:
    from drumline.training.manager import RunManager
    from drumline.training.saved.saved_run import SavedRun

ENDINGS = (".jsonl", ".npy")
OWN_FLAGS: FlagTable = {
    "to": (str, "FILE", "The file to write: .jsonl, or .npy for one array [JSON lines on stdout]."),
    **CHECKPOINT_FLAG,
    **RANK_FLAGS,
    "force": switch("Replace FILE if it exists."),
    **HELP_FLAG,
}
HELP = """\
usage: drumline predict RUN [DATA] [--to FILE] [--which best|last|STEP] [--procs N] [--section.name value ...]

Writes what Task.predict returns for every sample of a dataset, in the order of the samples, the same on any number of
ranks. DATA is a folder or file that the task's evaluation data is read from (as --data.dir), or a dataset of your own,
path/to/file.py:Class; without it, the task's evaluation data. The weights are those that the run evaluates with. The
settings are those of the checkpoint; flags override them. It imports the task's code and writes nothing into RUN.
"""


def run(argv: Sequence[str]) -> int:
    """Check the names before torch is imported."""
    flags = read_command(
        "predict", argv, {"": OWN_FLAGS}, HELP, max_positional=2, takes_settings=True
    )
    check_run_folder("predict", flags)
    if "to" in flags.values:
        to = Path(flags.values.to)
        if to.suffix not in ENDINGS:
            raise UsageError(
                f"{to} ends neither in .jsonl nor in .npy", next_step=f"give --to {to.stem}.jsonl"
            )
        # A rank may see the file that rank 0 has begun to write.
        if topology_from(os.environ) is None:
            check_new(flags, to)

    return run_on_ranks("predict", argv, flags, [flags.layer], partial(_run_rank, flags))


def _run_rank(flags: Flags) -> int:
    """Predict as one rank of a group, or alone: rank 0 writes the predictions of all ranks. Returns
    the exit code."""
    from drumline.training.saved.saved_run import (
        as_array,
        as_lines_of_json,
        predict_run,
        write_array,
    )

    data = flags.positional[1] if len(flags.positional) > 1 else None
    to = Path(flags.values.to) if "to" in flags.values else None
    is_array = to is not None and to.suffix == ".npy"

    def work(saved: SavedRun, ddp: RunManager) -> None:
        """Rank 0 writes; the others take part in the collectives."""
        parts = predict_run(saved, ddp, data, encode=as_array if is_array else as_lines_of_json)
        if not ddp.is_main_process():
            for _ in parts:
                pass
        elif to is None:
            for part in parts:
                show(part.decode(), end="", is_data=True)
        else:
            count = _write(to, parts, write_array if is_array else _write_lines)
            show_lines([f"step {saved.step}: {plural(count, 'prediction')} in {to}"])

    return with_saved_run(flags, work)


def _write(
    to: Path, parts: Iterator[bytes], write: Callable[[BinaryIO, Iterator[bytes]], int]
) -> int:
    """Returns the number of predictions."""
    to.parent.mkdir(parents=True, exist_ok=True)
    with replacing(to) as file:
        count = write(file, parts)
        file.flush()
        os.fsync(file.fileno())
        return count


def _write_lines(file: BinaryIO, parts: Iterator[bytes]) -> int:
    count = 0
    for part in parts:
        file.write(part)
        count += part.count(b"\n")
    return count

"""`load_checkpoint`: a saved model for a script of the user's own, to go on training or for inference."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from drumline.checkpoint import look, manifest, store
from drumline.checkpoint.state import restore
from drumline.errors import CheckpointError, as_list
from drumline.log import log


def load_checkpoint(
    path: str | PathLike[str], model: nn.Module, optimizer: Optimizer | None = None
) -> dict[str, Any]:
    """Load a checkpoint into a model, wrapped or not, on any device; returns the progress it was saved with.

    `path` is the folder of one step, or a run folder or its `checkpoints` folder: then the newest that is whole and
    finite. What is skipped for it, and a checkpoint that is not finite, is a warning in the log.
    """
    found = _find(Path(path))
    if (name := look.glance(found).non_finite) is not None:
        log.warning(f"the checkpoint {found} is loaded, though {name} is not finite")
    return restore(store.read(found), model, optimizer)


def _find(path: Path) -> Path:
    if not path.is_dir():
        raise CheckpointError(
            f"there is no folder {path} (looked in {Path.cwd()})",
            next_step="give a run folder, or one of the folders in its checkpoints/",
        )
    if (path / manifest.FILE_NAME).exists() or look.is_step_folder(path):
        look.verify(path)
        return path
    inner = path / "checkpoints"
    found = look.newest_valid(inner if inner.is_dir() else path)
    if found.path is None:
        reasons = [f"{one.path.name} is corrupt or incomplete: {one.reason}" for one in found.skipped]
        raise CheckpointError(
            as_list(f"there is no whole checkpoint in {path}", reasons),
            next_step="give a run folder, or one of the folders in its checkpoints/",
        )
    for skipped in found.skipped:
        log.warning(f"the checkpoint {skipped.path} was skipped: {skipped.reason}")
    return found.path

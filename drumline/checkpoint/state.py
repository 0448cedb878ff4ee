"""Captures model, optimizer, scaler and progress as tensors and documents by file, and restores them.

The engine captures a snapshot on rank 0, adds the random state of every rank, and hands it to the store. On resume
rank 0 reads the files, and every rank restores from the same plain dicts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from drumline.checkpoint import catalog, manifest, store
from drumline.checkpoint.optimizer_state import load_optimizer_state, optimizer_state
from drumline.checkpoint.store import Snapshot
from drumline.distributed.wrap import unwrap_model
from drumline.errors import CheckpointError, CheckpointMismatchError, as_list, log


def capture(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    scaler: GradScaler | None = None,
    progress: Mapping[str, Any],
) -> Snapshot:
    """What to save. The tensors share memory with the model: write them before the next step."""
    tensors, aliases = model_state(model)
    snapshot = Snapshot(
        tensors={"model": tensors}, documents={"model": {"aliases": aliases}, "progress": dict(progress)}
    )
    if optimizer is not None:
        snapshot.tensors["optimizer"], snapshot.documents["optimizer"] = optimizer_state(model, optimizer)
    if scaler is not None:
        snapshot.documents["scaler"] = scaler.state_dict()
    return snapshot


def restore(
    snapshot: Snapshot, model: nn.Module, optimizer: Optimizer | None = None, *, scaler: GradScaler | None = None
) -> dict[str, Any]:
    """Put a snapshot back into a model, wrapped or not, on any device; returns the progress."""
    tensors, documents = snapshot.tensors, snapshot.documents
    with translated("model"):
        progress: dict[str, Any] = documents["progress"]
        weights = tensors["model"]
        aliases = {str(one): str(of) for one, of in documents["model"]["aliases"].items()}
    load_model_state(model, weights, aliases)
    if optimizer is not None:
        if "optimizer" not in documents:
            raise CheckpointError(
                "the checkpoint holds no optimizer state", next_step="load the model alone, without an optimizer"
            )
        with translated("optimizer"):
            load_optimizer_state(model, optimizer, tensors["optimizer"], documents["optimizer"])
    # A run that turns fp16 on later has no scale to take over: its scaler starts anew.
    if scaler is not None and documents.get("scaler"):
        with translated("scaler"):
            scaler.load_state_dict(documents["scaler"])
    return progress


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Report what fails here as an error of the checkpoint. Its checksums are right, so it was saved like that."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"the checkpoint's {what} is not what Drumline saves: {type(error).__name__}: {error}",
            next_step="use an earlier checkpoint, or one from another source",
        ) from error


def model_state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors by name, sharing memory with the model, and the aliases: other name -> stored name."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    stored_at: dict[object, str] = {}
    for name, tensor in _state_tensors(model).items():
        place = _memory(tensor)
        if place in stored_at:
            aliases[name] = stored_at[place]
        else:
            tensors[name] = tensor
            stored_at[place or name] = name
    return tensors, aliases


def load_model_state(model: nn.Module, tensors: Mapping[str, Tensor], aliases: Mapping[str, str]) -> None:
    """Copy the tensors into the model, wherever it is; every name and shape must match, or nothing is copied."""
    saved = {**tensors, **{name: tensors[stored] for name, stored in aliases.items() if stored in tensors}}
    if problems := list(_model_differences(saved, model)):
        raise CheckpointMismatchError(
            as_list("the checkpoint is of another model:", problems),
            next_step="set the model up as for the checkpoint (see config.toml in the run folder)",
        )
    unwrap_model(model).load_state_dict(saved)


def _state_tensors(model: nn.Module) -> dict[str, Tensor]:
    entries = unwrap_model(model).state_dict()
    for name, entry in entries.items():
        if not isinstance(entry, Tensor):
            raise CheckpointError(
                f"the model's {name} cannot be saved: it is a {type(entry).__name__}, not a tensor",
                next_step="let get_extra_state return a tensor",
            )
    return dict(entries)


def _memory(tensor: Tensor) -> tuple[object, ...] | None:
    """Equal for two names of the same tensor; None for a tensor without memory."""
    if not tensor.numel() or tensor.is_meta or tensor.layout is not torch.strided:
        return None
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def _model_differences(saved: Mapping[str, Tensor], model: nn.Module) -> Iterator[str]:
    wanted = _state_tensors(model)
    yield from (f"{name} is missing in the checkpoint" for name in wanted if name not in saved)
    yield from (f"{name} is not in the model" for name in saved if name not in wanted)
    for name, ours in wanted.items():
        if (theirs := saved.get(name)) is None:
            continue
        if ours.shape != theirs.shape:
            yield f"{name} is {list(theirs.shape)} in the checkpoint and {list(ours.shape)} in the model"
        elif ours.dtype != theirs.dtype and not (ours.is_floating_point() and theirs.is_floating_point()):
            yield f"{name} is {theirs.dtype} in the checkpoint and {ours.dtype} in the model"
    for name, stored in model_state(model)[1].items():
        one, other = saved.get(name), saved.get(stored)
        # The same tensor is not compared with itself: NaN differs from NaN.
        if one is not None and other is not None and one is not other and not torch.equal(one, other):
            yield f"{name} and {stored} differ in the checkpoint and are one tensor in the model"


def load_checkpoint(path: str | PathLike[str], model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Load a checkpoint into a model, wrapped or not, on any device; returns the progress it was saved with.

    `path` is the folder of one step, or a run folder or its `checkpoints` folder: then the newest that is complete and
    finite. What is skipped for it, and a checkpoint that is not finite, is a warning in the log.
    """
    found = _find_checkpoint(Path(path))
    if (name := catalog.check_sizes(found).non_finite) is not None:
        log.warning(f"the checkpoint {found} is loaded, though {name} is not finite")
    return restore(store.read(found), model, optimizer)


def _find_checkpoint(path: Path) -> Path:
    next_step = "give a run folder, or one of the folders in its checkpoints/"
    if not path.is_dir():
        raise CheckpointError(f"there is no folder {path} (looked in {Path.cwd()})", next_step=next_step)
    if (path / manifest.FILE_NAME).exists() or catalog.STEP_NAME.fullmatch(path.name):
        catalog.verify(path)
        return path
    inner = path / "checkpoints"
    found = catalog.newest_valid(inner if inner.is_dir() else path)
    if found.path is None:
        reasons = [f"{one.path.name} is corrupt or incomplete: {one.reason}" for one in found.skipped]
        what = as_list(f"there is no complete checkpoint in {path}", reasons)
        raise CheckpointError(what, next_step=next_step)
    for skipped in found.skipped:
        log.warning(f"the checkpoint {skipped.path} was skipped: {skipped.reason}")
    return found.path

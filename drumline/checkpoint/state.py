"""What is saved: model, optimizer, scaler and progress, as tensors and documents by file; and back.

The engine captures a snapshot on rank 0, adds the random state of every rank, and hands it to the store. On resume
every rank restores from the same plain dicts, whoever read them and however they travelled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from drumline.checkpoint.model_state import load_model_state, model_state
from drumline.checkpoint.optimizer_state import load_optimizer_state, optimizer_state
from drumline.checkpoint.store import Snapshot
from drumline.errors import CheckpointError


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
    snapshot: Snapshot,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    scaler: GradScaler | None = None,
) -> dict[str, Any]:
    """Put a snapshot back into a model, wrapped or not, on any device; returns the progress."""
    tensors, documents = snapshot.tensors, snapshot.documents
    with translated("model"):
        progress: dict[str, Any] = documents["progress"]
        weights, aliases = (
            tensors["model"],
            {str(one): str(of) for one, of in documents["model"]["aliases"].items()},
        )
    load_model_state(model, weights, aliases)
    if optimizer is not None:
        if "optimizer" not in documents:
            raise CheckpointError(
                "the checkpoint holds no optimizer state",
                next_step="load the model alone, without an optimizer",
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
    """What fails here fails because of the checkpoint. Its checksums are right, so somebody has saved it like that."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"the checkpoint's {what} is not what Drumline saves: {type(error).__name__}: {error}",
            next_step="use an earlier checkpoint, or one from another source",
        ) from error

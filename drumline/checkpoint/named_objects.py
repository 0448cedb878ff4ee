"""The named objects of a user's own loop in a checkpoint: whether they can be saved, and whether
they match it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from drumline.base.errors import CheckpointMismatchError, UsageError, as_list
from drumline.base.text import join_names
from drumline.checkpoint import store
from drumline.checkpoint.state import check_rng_file
from drumline.runs import catalog
from drumline.runs.manifest import NAME, CorruptCheckpointError

_OWN_FILES = ("manifest", "progress", "rng")
_KINDS = {"model": "a model", "optimizer": "an optimizer", "state": "another object"}


def check_objects(objects: Mapping[str, Any]) -> dict[str, str]:
    """The kind of each object (model, optimizer or state), unless something cannot be saved."""
    if not objects:
        raise UsageError(
            "ddp.checkpoint was given nothing to save",
            next_step='name what to save: ddp.checkpoint("runs/mine", model=model, optimizer=optimizer)',
        )
    for name, value in objects.items():
        _check_object(name, value)
    models = [value for value in objects.values() if isinstance(value, nn.Module)]
    of_models = {id(parameter) for model in models for parameter in model.parameters()}
    for name, value in objects.items():
        if isinstance(value, Optimizer) and not parameters_of(value) <= of_models:
            raise UsageError(
                f"ddp.checkpoint cannot save {name}: it has parameters of a model that was not given",
                next_step="give the models of every optimizer, too",
            )
    return {name: _kind(value) for name, value in objects.items()}


def _check_object(name: str, value: Any) -> None:
    if name in _OWN_FILES or not NAME.fullmatch(name):
        raise UsageError(
            f"ddp.checkpoint cannot save an object as {name}: files are named so",
            next_step=f"give it another name of ASCII letters; taken are {join_names(_OWN_FILES)}",
        )
    if not (
        callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    ):
        raise UsageError(
            f"ddp.checkpoint cannot save {name}: {type(value).__name__} has no state_dict() and load_state_dict()",
            next_step="give models, optimizers, training loaders, or objects with both methods",
        )


def _kind(value: Any) -> str:
    if isinstance(value, nn.Module):
        return "model"
    if isinstance(value, Optimizer):
        return "optimizer"
    return "state"


def parameters_of(optimizer: Optimizer) -> set[int]:
    """The `id` of each."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def check_same_objects(saved: Mapping[str, str], objects: Mapping[str, str]) -> None:
    """Refuse a checkpoint that holds other objects, by name and kind, than were given."""
    problems = [
        *(f"{name} is not in the checkpoint" for name in objects if name not in saved),
        *(
            f"{name} is in the checkpoint and was not given"
            for name in saved
            if name not in objects
        ),
        *(
            f"{name} was {_KINDS[saved[name]]} and is now {_KINDS[kind]}"
            for name, kind in objects.items()
            if saved.get(name, kind) != kind
        ),
    ]
    if problems:
        raise CheckpointMismatchError(
            as_list("the checkpoint holds other objects than ddp.checkpoint was given:", problems),
            next_step="give the objects that it was saved with, by the same names, or another folder",
        )


def check_contents(path: Path) -> None:
    """Check what checksums do not show: whoever wrote them may have written anything."""
    snapshot = store.read(path)
    progress = snapshot.documents.get("progress")
    objects = progress.get("objects") if isinstance(progress, dict) else None
    if not isinstance(progress, dict) or not isinstance(objects, dict):
        raise CorruptCheckpointError(path, "it was not saved by ddp.checkpoint")
    is_complete = (
        "rng" in snapshot.tensors
        and progress.get("step") == catalog.check_sizes(path).step
        and type(progress.get("world_size")) is int
        and all(
            kind in tuple(_KINDS) and name in snapshot.documents for name, kind in objects.items()
        )
    )
    if not is_complete:
        raise CorruptCheckpointError(path, "it does not hold what progress.json names")
    check_rng_file(path, snapshot.tensors["rng"])

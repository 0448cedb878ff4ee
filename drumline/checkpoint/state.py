"""What a checkpoint holds: model, optimizer, scaler and progress, captured as tensors and documents
by file; and the random state of each rank.

The engine captures a snapshot on rank 0, adds the random state of every rank, and passes it to the
store. On resume rank 0 reads the files, and every rank restores from the same plain dicts.
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

from drumline.base.errors import CheckpointError, CheckpointMismatchError, as_list, log
from drumline.base.text import join_names
from drumline.checkpoint import store
from drumline.checkpoint.optimizer_state import load_optimizer_state, optimizer_state
from drumline.checkpoint.store import Snapshot
from drumline.checkpoint.tensor_file import Tensors
from drumline.parallel.shards import is_shard
from drumline.parallel.wrap import unwrap_model
from drumline.rank.collectives import gather_tensors
from drumline.rank.determinism import capture_rng, check_rng, restore_rng
from drumline.runs import catalog, manifest
from drumline.runs.manifest import CorruptCheckpointError


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
        tensors={"model": tensors},
        documents={"model": {"aliases": aliases}, "progress": dict(progress)},
    )
    if optimizer is not None:
        tensors, document = optimizer_state(model, optimizer)
        snapshot.tensors["optimizer"] = tensors
        snapshot.documents["optimizer"] = document

    if scaler is not None:
        snapshot.documents["scaler"] = scaler.state_dict()

    return snapshot


def restore(
    snapshot: Snapshot,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    scaler: GradScaler | None = None,
    name: str = "model",
) -> dict[str, Any]:
    """Load a snapshot into a model, wrapped or not, on any device; returns the progress. `name`:
    the model's name in the snapshot."""
    tensors = snapshot.tensors
    documents = snapshot.documents
    with translated("model"):
        progress: dict[str, Any] = documents["progress"]

    restore_model(snapshot, model, name=name)

    if optimizer is not None:
        if "optimizer" not in documents:
            raise CheckpointError(
                "the checkpoint holds no optimizer state",
                next_step="load the model alone, without an optimizer",
            )

        with translated("optimizer"):
            load_optimizer_state(model, optimizer, tensors["optimizer"], documents["optimizer"])

    # A run that turns fp16 on later has no saved scale: its scaler starts with the default.
    if scaler is not None and documents.get("scaler"):
        with translated("scaler"):
            scaler.load_state_dict(documents["scaler"])

    return progress


def restore_model(snapshot: Snapshot, model: nn.Module, *, name: str = "model") -> None:
    """Load the weights and buffers of a snapshot into a model."""
    with translated("model"):
        weights = snapshot.tensors[name]
        aliases = {str(alias): str(of) for alias, of in snapshot.documents[name]["aliases"].items()}

    load_model_state(model, weights, aliases)


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Report errors in this block as errors of the checkpoint. Its checksums are right, so it was
    saved like that."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"the checkpoint's {what} is not what Drumline saves: {type(error).__name__}: {error}",
            next_step="use an earlier checkpoint, or one from another source",
        ) from error


def model_state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors by name, sharing memory with the model, and the aliases: other name -> stored
    name."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    stored_at: dict[object, str] = {}

    for name, tensor in _state_tensors(model).items():
        key = _identity(tensor, name)
        if key in stored_at:
            aliases[name] = stored_at[key]
        else:
            tensors[name] = tensor.detach()
            stored_at[key] = name

    return tensors, aliases


def _identity(tensor: Tensor, name: str) -> object:
    """The same for two names of one tensor; a tensor without memory has no alias. A shard may be
    empty, so it is known by its object."""
    if is_shard(tensor):
        return id(tensor)

    has_memory = tensor.numel() and not tensor.is_meta and tensor.layout is torch.strided
    if not has_memory:
        return name

    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def load_model_state(
    model: nn.Module,
    tensors: Tensors,
    aliases: Mapping[str, str],
) -> None:
    """Copy the tensors into the model, on any device; if a name or shape does not match, nothing is
    copied."""
    saved = dict(tensors)
    for name, stored in aliases.items():
        if stored in tensors:
            saved[name] = tensors[stored]

    if problems := list(_model_differences(saved, model)):
        raise CheckpointMismatchError(
            as_list("the checkpoint is of another model:", problems),
            next_step="set the model up as for the checkpoint (see config.toml in the run folder)",
        )

    unwrap_model(model).load_state_dict(saved)


def _state_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a model, whose entries must be tensors."""
    entries = unwrap_model(model).state_dict(keep_vars=True)
    for name, entry in entries.items():
        if not isinstance(entry, Tensor):
            raise CheckpointError(
                f"the model's {name} cannot be saved: it is a {type(entry).__name__}, not a tensor",
                next_step="let get_extra_state return a tensor",
            )

    return dict(entries)


def _model_differences(saved: Tensors, model: nn.Module) -> Iterator[str]:
    """How saved tensors and a model differ: names, shapes, types, and tied tensors."""
    current = _state_tensors(model)
    yield from (f"{name} is missing in the checkpoint" for name in current if name not in saved)
    yield from (f"{name} is not in the model" for name in saved if name not in current)

    for name, tensor in current.items():
        if name in saved:
            yield from _tensor_differences(name, saved[name], tensor)

    _, aliases = model_state(model)
    for alias, name in aliases.items():
        if alias not in saved or name not in saved or saved[alias] is saved[name]:
            continue  # a tensor is not compared with itself: NaN differs from NaN
        if not torch.equal(saved[alias], saved[name]):
            yield f"{alias} and {name} differ in the checkpoint and are one tensor in the model"


def _tensor_differences(name: str, saved: Tensor, current: Tensor) -> Iterator[str]:
    """Whether a tensor can be loaded: floating-point types may differ."""
    both_float = saved.is_floating_point() and current.is_floating_point()
    if saved.shape != current.shape:
        yield f"{name} is {list(saved.shape)} in the checkpoint and {list(current.shape)} in the model"
    elif saved.dtype != current.dtype and not both_float:
        yield f"{name} is {saved.dtype} in the checkpoint and {current.dtype} in the model"


def load_checkpoint(
    path: str | PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    name: str = "model",
) -> dict[str, Any]:
    """Load a checkpoint into a model, wrapped or not, on any device; returns the progress it was
    saved with.

    `path` is the folder of one step, or a run folder or its `checkpoints` folder: then the newest
    complete and finite checkpoint is loaded. Skipped checkpoints, and one that is not finite, are
    logged as warnings. `name`: the model's name in `ddp.checkpoint`.
    """
    folder = _find_checkpoint(Path(path))
    if (tensor := catalog.check_sizes(folder).non_finite) is not None:
        log.warning(f"the checkpoint {folder} is loaded, though {tensor} is not finite")

    snapshot = store.read(folder)
    if name not in snapshot.tensors:
        models = sorted(snapshot.tensors.keys() - {"rng"})
        next_step = "give another checkpoint"
        if models:
            next_step = f"load_checkpoint(..., name={models[0]!r})"

        raise CheckpointError(
            f"the checkpoint {folder} holds no {name}, but {join_names(models)}",
            next_step=next_step,
        )

    return restore(snapshot, model, optimizer, name=name)


def _find_checkpoint(path: Path) -> Path:
    """The folder of one step, verified."""
    next_step = "give a run folder, or one of the folders in its checkpoints/"
    if not path.is_dir():
        what = f"there is no folder {path} (looked in {Path.cwd()})"
        raise CheckpointError(what, next_step=next_step)

    if (path / manifest.FILE_NAME).exists() or catalog.STEP_NAME.fullmatch(path.name):
        catalog.verify(path)
        return path

    inner = path / "checkpoints"
    newest = catalog.newest_valid(inner if inner.is_dir() else path)
    if newest.path is None:
        reasons = [
            f"{skipped.path.name} is corrupt or incomplete: {skipped.reason}"
            for skipped in newest.skipped
        ]
        what = as_list(f"there is no complete checkpoint in {path}", reasons)
        raise CheckpointError(what, next_step=next_step)

    for skipped in newest.skipped:
        log.warning(f"the checkpoint {skipped.path} was skipped: {skipped.reason}")

    return newest.path


# The random state of each rank


def gather_rng(device: torch.device) -> dict[str, Tensor]:
    """Collective: the random state of every rank, as the tensors of a checkpoint's file."""
    gathered = gather_tensors(capture_rng(device))
    return {_rng_name(rank): state for rank, state in enumerate(gathered)}


def restore_own_rng(saved: Tensors, *, rank: int, device: torch.device) -> None:
    """Restore this rank's random state. A rank that did not exist when it was saved keeps its new
    seed."""
    if (state := saved.get(_rng_name(rank))) is not None:
        restore_rng(state, device)


def check_rng_file(path: Path, saved: Tensors) -> None:
    """Refuse a checkpoint whose random states are not valid."""
    try:
        for state in saved.values():
            check_rng(state)
    except ValueError as error:
        raise CorruptCheckpointError(path, f"rng.safetensors: {error}") from error


def _rng_name(rank: int) -> str:
    """Of the tensor with the random state of a rank."""
    return f"rank-{rank:05d}"

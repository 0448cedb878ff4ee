"""Checkpoints of a user's own loop: models, optimizers, loaders and whatever has a `state_dict`,
each by its name.

The format is that of `drumline train`: `NAME.safetensors` and `NAME.json` for each object,
`progress.json`, and `rng.safetensors` with the random state of every rank. State that differs from
rank to rank is saved of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drumline.base.errors import CheckpointError, CheckpointMismatchError, UsageError, as_list, log
from drumline.base.text import join_names
from drumline.base.untrusted import from_json, make_own_folder
from drumline.checkpoint import store
from drumline.checkpoint.finite import first_non_finite
from drumline.checkpoint.optimizer_state import (
    Models,
    encode_state,
    load_optimizer_state,
    optimizer_state,
)
from drumline.checkpoint.rank_states import gather_states, is_same_everywhere, state_of_rank
from drumline.checkpoint.retention import Retention, prune
from drumline.checkpoint.state import (
    check_rng_file,
    gather_rng,
    model_state,
    restore_model,
    restore_own_rng,
    translated,
)
from drumline.checkpoint.store import Snapshot, WritingRank
from drumline.checkpoint.writer import CapturedState, CheckpointWriter
from drumline.parallel.wrap import LiveBuffers, unwrap_model
from drumline.rank.collectives import broadcast_json
from drumline.runs import catalog
from drumline.runs.manifest import NAME, CorruptCheckpointError

_OWN_FILES = ("manifest", "progress", "rng")
_KINDS = {"model": "a model", "optimizer": "an optimizer", "state": "another object"}


class _SavedLoop(msgspec.Struct):
    """What `resume` reads in progress.json."""

    step: int
    world_size: int
    objects: dict[str, Literal["model", "optimizer", "state"]]
    """The kind of each, by name."""


class Checkpoint:
    """Saves and resumes a loop of your own. `DDPManager.checkpoint` makes it."""

    def __init__(
        self,
        folder: Path,
        objects: Mapping[str, Any],
        *,
        this_rank: WritingRank,
        world_size: int,
        device: torch.device,
        keep_last: int,
        saving: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`saving` is entered while this works, for the watchdog."""
        self._kinds = _check_objects(objects)
        """By name: a key of `_KINDS`."""

        if keep_last < 1:
            raise UsageError(
                f"keep_last cannot be {keep_last}",
                next_step="keep at least the newest: keep_last=1",
            )

        self.folder = folder
        self._root = folder / "checkpoints"
        """The folder of the checkpoints."""

        self._objects = dict(objects)
        self._models = {
            name: value for name, value in objects.items() if isinstance(value, nn.Module)
        }
        """Those of the objects that are models."""

        self._saving = saving
        """Entered while this works, for the watchdog."""

        self._this_rank = this_rank
        self._world_size = world_size
        self._device = device
        self._has_resumed = False

        self._writer = CheckpointWriter(
            self._root,
            this_rank,
            device,
            publish=lambda newest: prune(self._root, Retention(keep_last), newest=newest),
        )
        self._writer.rehearse()
        if this_rank.rank == 0:
            self._make_folder()

    def resume(self) -> int:
        """Collective: put everything back to where the newest complete checkpoint was taken, the
        random numbers of all ranks too; returns its step. 0: there is none, and the run begins.

        One that is corrupt or not finite is skipped, with a warning, for the one before it. If none
        is finite, the newest is loaded, with a warning."""
        with self._saving():
            self._has_resumed = True
            snapshot = self._read()
            if snapshot is None:
                return 0

            progress = snapshot.documents["progress"]
            rng = snapshot.tensors["rng"]
            _check_same_objects(progress["objects"], self._kinds)
            for name in self._objects:
                self._restore(name, snapshot)

            rank = self._this_rank.rank
            if progress["world_size"] != self._world_size and rank == 0:
                log.warning(self._about_ranks(progress["world_size"], snapshot.documents))

            restore_own_rng(rng, rank=rank, device=self._device)
            return int(progress["step"])

    def save(self, step: int) -> None:
        """Collective: save everything as it is after this step. Training pauses for a copy; a
        thread writes it.

        Waits for the save before it, and raises its error."""
        self._check_can_save(step)
        with self._saving():
            self.wait()

            # Buffers are saved from rank 0: all ranks continue with its, as a resumed run does.
            for model in self._models.values():
                if all(buffer.device == self._device for buffer in model.buffers()):
                    LiveBuffers(unwrap_model(model)).broadcast()

            state = self._capture(step)
            if not self._writer.is_writer:
                return

            state = replace(state, non_finite=_check_finite(state))
            if self._writer.start(state, copies=True) == "none":
                self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is complete; raises its error."""
        self._writer.take()

    def close(self, *, failed: bool = False) -> None:
        """Finish the checkpoint that is being written. `failed`: its error is only logged, since
        there is another."""
        try:
            with self._saving():
                self.wait()
        except Exception as error:
            if not failed:
                raise
            log.warning(error)

    def _make_folder(self) -> None:
        """What another user owns is refused: its links would choose what is written and deleted
        where."""
        try:
            make_own_folder(self.folder, follow_links=True)  # the user named it
            make_own_folder(self._root)
        except OSError as error:
            raise UsageError(
                f"ddp.checkpoint cannot use the folder {self.folder}: {error.strerror}",
                next_step="give it a folder of your own",
            ) from error

    def _capture(self, step: int) -> CapturedState:
        """Collective."""
        progress = {"step": step, "objects": self._kinds, "world_size": self._world_size}
        rng = gather_rng(self._device)
        state = CapturedState(step, {}, {"rng": rng}, {"progress": progress})

        for name, value in self._objects.items():
            if isinstance(value, nn.Module):
                state.live[name], aliases = model_state(value)
                state.documents[name] = {"aliases": aliases}
            elif isinstance(value, Optimizer):
                models = self._models_of(value)
                state.live[name], state.documents[name] = optimizer_state(models, value)
            else:
                self._capture_object(name, value, state)

        return state

    def _capture_object(self, name: str, value: Any, state: CapturedState) -> None:
        """Collective: one state for all ranks where theirs are the same, as most are."""
        tensors: dict[str, Tensor] = {}
        encoded = encode_state(value.state_dict(), name, tensors)
        if self._world_size == 1 or is_same_everywhere(encoded, tensors, device=self._device):
            state.documents[name] = {"ranks": [encoded]}
            files = state.live
            tensors = {f"0/{key}": tensor for key, tensor in tensors.items()}
        else:
            files = state.frozen
            state.documents[name], tensors = gather_states(encoded, tensors)

        if tensors:
            files[name] = tensors

    def _read(self) -> Snapshot | None:
        """Collective: the checkpoint to resume from; rank 0 reads it."""
        snapshot: Snapshot | None = None
        skipped: list[catalog.Skipped] = []
        if self._this_rank.rank == 0:
            path, skipped = catalog.newest_valid(self._root, _check_contents)
            if path is not None:
                snapshot = store.read(path)
                self._warn_about(path, skipped)

        why_not = skipped[0].reason if skipped else None
        has_snapshot, why_not = broadcast_json([snapshot is not None, why_not])
        if has_snapshot:
            return store.broadcast(snapshot)
        if why_not is None:
            return None

        raise CheckpointError(
            f"no checkpoint in {self._root} can be resumed; the newest: {why_not}",
            next_step="restore one from a backup, or give ddp.checkpoint another folder",
        )

    def _warn_about(self, path: Path, skipped: list[catalog.Skipped]) -> None:
        """What the user should know of the checkpoint that is resumed."""
        for corrupt in skipped:
            log.warning(f"the checkpoint {corrupt.path} was skipped: {corrupt.reason}")

        non_finite = catalog.check_sizes(path).non_finite
        if non_finite is not None:
            log.warning(
                f"no checkpoint is finite: {non_finite} of {path} is not; to start again, give ddp.checkpoint "
                "another folder"
            )

    def _restore(self, name: str, snapshot: Snapshot) -> None:
        """Load what was saved of one object into it."""
        value = self._objects[name]
        document = snapshot.documents[name]
        tensors = snapshot.tensors.get(name, {})

        with _naming(name):
            if isinstance(value, nn.Module):
                restore_model(snapshot, value, name=name)
            elif isinstance(value, Optimizer):
                load_optimizer_state(self._models_of(value), value, tensors, document)
            else:
                _load(value, state_of_rank(document, tensors, self._this_rank.rank))

    def _about_ranks(self, saved: int, documents: Mapping[str, Any]) -> str:
        """The warning that the number of ranks has changed; it names the objects with a state for
        each rank."""
        message = f"the number of ranks changed since the checkpoint: {saved} -> {self._world_size}"
        names = [name for name in self._objects if len(documents[name].get("ranks", ())) > 1]
        if not names:
            return f"{message}; the samples of a loader are the same, but not the bits"

        return (
            f"{message}; each rank had its own state of {join_names(names)}: the states of missing ranks are not "
            f"used, and new ranks get a copy of that of rank {saved - 1}"
        )

    def _check_can_save(self, step: int) -> None:
        """Refuse to save before `resume`, or between the micro-batches of a step."""
        if not self._has_resumed:
            raise UsageError(
                f"save({step}) was called before resume()",
                next_step="call resume() once before the loop: in a new folder it returns 0",
            )

        for name, value in self._objects.items():
            # A loader of ours: its cursor is at the start of the step, whose gradients would be
            # lost.
            if not getattr(value, "is_last_micro_batch", True):
                raise UsageError(
                    f"save({step}) was called in the middle of a step: {name} has more micro-batches of it",
                    next_step=f"save after optimizer.step(), where {name}.is_last_micro_batch is True",
                )

    def _models_of(self, optimizer: Optimizer) -> Models:
        """The model that has all its parameters, so that they keep their own names; otherwise all
        models."""
        parameters = _parameters_of(optimizer)
        for model in self._models.values():
            if parameters <= {id(parameter) for parameter in model.parameters()}:
                return model
        return self._models


def _check_finite(state: CapturedState) -> str | None:
    """The first tensor that is not finite, with a warning; None: all are."""
    tensors = {
        f"{file}/{name}": tensor
        for file, group in state.live.items()
        for name, tensor in group.items()
    }
    non_finite = first_non_finite(tensors)
    if non_finite is not None:
        log.warning(
            f"{non_finite} is not finite at step {state.step}; resume() skips a checkpoint that is not"
        )
    return non_finite


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Errors name the object, and what to do in a user's own loop."""
    try:
        with translated(name):
            yield
    except CheckpointMismatchError as error:
        error.what = f"{name}: {error.what}"
        next_step = "build it as it was for the checkpoint, or give ddp.checkpoint another folder"
        error.next_step = next_step
        raise


def _load(value: Any, state: Any) -> None:
    """Report whatever load_state_dict raises as a mismatch."""
    try:
        value.load_state_dict(state)
    except Exception as error:
        raise CheckpointMismatchError(
            f"{type(value).__name__}.load_state_dict() failed: {type(error).__name__}: {error}"
        ) from error


def _check_objects(objects: Mapping[str, Any]) -> dict[str, str]:
    """The kind of each object (model, optimizer or state), unless something cannot be saved."""
    if not objects:
        raise UsageError(
            "ddp.checkpoint was given nothing to save",
            next_step='name what to save: ddp.checkpoint("runs/mine", model=model, optimizer=optimizer)',
        )

    for name, value in objects.items():
        if name in _OWN_FILES or not NAME.fullmatch(name):
            raise UsageError(
                f"ddp.checkpoint cannot save an object as {name}: files are named so",
                next_step=f"give it another name of ASCII letters; taken are {join_names(_OWN_FILES)}",
            )

        methods = (getattr(value, "state_dict", None), getattr(value, "load_state_dict", None))
        if not all(map(callable, methods)):
            raise UsageError(
                f"ddp.checkpoint cannot save {name}: {type(value).__name__} has no state_dict() and load_state_dict()",
                next_step="give models, optimizers, training loaders, or objects with both methods",
            )

    _check_optimizers(objects)
    return {name: _kind(value) for name, value in objects.items()}


def _check_optimizers(objects: Mapping[str, Any]) -> None:
    """Refuse an optimizer without the models of all its parameters."""
    models = [value for value in objects.values() if isinstance(value, nn.Module)]
    of_models = {id(parameter) for model in models for parameter in model.parameters()}

    for name, value in objects.items():
        if isinstance(value, Optimizer) and not _parameters_of(value) <= of_models:
            raise UsageError(
                f"ddp.checkpoint cannot save {name}: it has parameters of a model that was not given",
                next_step="give the models of every optimizer, too",
            )


def _kind(value: Any) -> str:
    """A key of `_KINDS`."""
    if isinstance(value, nn.Module):
        return "model"
    if isinstance(value, Optimizer):
        return "optimizer"
    return "state"


def _parameters_of(optimizer: Optimizer) -> set[int]:
    """The `id` of each."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _check_same_objects(saved: Mapping[str, str], objects: Mapping[str, str]) -> None:
    """Refuse a checkpoint that holds other objects, by name and kind, than were given."""
    problems = [f"{name} is not in the checkpoint" for name in objects if name not in saved]
    for name, kind in saved.items():
        if name not in objects:
            problems.append(f"{name} is in the checkpoint and was not given")
        elif kind != objects[name]:
            problems.append(f"{name} was {_KINDS[kind]} and is now {_KINDS[objects[name]]}")

    if problems:
        raise CheckpointMismatchError(
            as_list("the checkpoint holds other objects than ddp.checkpoint was given:", problems),
            next_step="give the objects that it was saved with, by the same names, or another folder",
        )


def _check_contents(path: Path) -> None:
    """Check what checksums do not show: whoever wrote them may have written anything."""
    snapshot = store.read(path)
    try:
        progress = from_json(_SavedLoop, snapshot.documents.get("progress"))
    except ValueError as error:
        raise CorruptCheckpointError(path, "it was not saved by ddp.checkpoint") from error

    has_all = "rng" in snapshot.tensors and progress.objects.keys() <= snapshot.documents.keys()
    if not has_all or progress.step != catalog.check_sizes(path).step:
        raise CorruptCheckpointError(path, "it does not hold what progress.json names")
    check_rng_file(path, snapshot.tensors["rng"])

"""How a run resumes: whether a restart can help after the previous failure, and the newest complete
checkpoint. Rank 0 reads it and sends the other ranks what they need, so that only rank 0 needs the
folder; of a sharded model every rank reads its own rows.

Diagnoses of the sidecars are in `RUN/diagnoses`, each with the name of its launch.
`RUN/watch/launch.json` has the name of this launch: rank 0 draws it at the first start and keeps it
at a restart, with any launcher.

    begin_launch     after a failure: refuse a restart that would fail again at the same step
    find_newest      the newest complete checkpoint, and why newer ones are skipped
    resume           restore it, unless the run has finished or its settings would have no effect
    report_resume    what has changed since it was saved
    report_recovery  after the first step: how long the failure has cost
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec
from torch import Tensor

from drumline.base.errors import (
    CheckpointError,
    CheckpointMismatchError,
    HangError,
    OptimizerMismatchError,
    Place,
    UsageError,
    as_list,
    log,
)
from drumline.base.untrusted import from_json, make_own_folder, read_record
from drumline.checkpoint import state, store
from drumline.checkpoint.rank_states import sent_state, state_of_rank
from drumline.checkpoint.shard_files import own_shards
from drumline.checkpoint.state import check_rng_file, restore_own_rng
from drumline.config.fields import scope_of
from drumline.data.sharding import Cursor
from drumline.parallel.comm_hook import PowerSGD
from drumline.parallel.shards import sharded_parameters
from drumline.rank.collectives import broadcast_json, gather_json
from drumline.rank.determinism import platform_facts
from drumline.runs import catalog
from drumline.runs.events import Reporter
from drumline.runs.manifest import CorruptCheckpointError
from drumline.runs.run_folder import RunFolder, write_whole
from drumline.training.between_steps.saver import COMM_FILE, DATA_FILE
from drumline.training.job.job import Job, Progress, flat
from drumline.training.job.optimizer import optimizer_class
from drumline.training.manager import RunManager
from drumline.training.replica_state import REPLICAS_FILE, restore_replica
from drumline.training.run_context import HOOKS_FILE, RunContext, RunFacts, RunRequest, TaskHooks
from drumline.watch.diagnosis.diagnosis import Cause
from drumline.watch.diagnosis.diagnosis_files import read_diagnoses
from drumline.watch.heartbeat import Phase
from drumline.watch.watch_folder import has_ended_ranks

MOST_AT_ONE_STEP = 3
NEW_RUN = "start a new run: --fresh moves this one aside, --run DIR trains in another folder"
DiagnosisRecord = Mapping[str, Any]
"""A file of `RUN/diagnoses`, as `read_diagnoses` returns it."""

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class _SavedSettings(msgspec.Struct, rename={"optimizer": "optim.name"}):
    """What every version has recorded."""

    optimizer: str


class _SavedFacts(msgspec.Struct):
    """What a resumed run compares with its own settings."""

    task: str
    config: _SavedSettings
    world_size: int
    batch_size: int


class _SavedCursor(msgspec.Struct, forbid_unknown_fields=True):
    """`Cursor`: where in the data the run is."""

    epoch: _Count
    position: _Count


class _SavedStop(msgspec.Struct):
    """Why a hook has ended the run before its last step, and how long it was then to be."""

    reason: str
    unit: str
    length: int


class _SavedProgress(msgspec.Struct):
    """What a resumed run reads in progress.json."""

    step: _Count
    cursor: _SavedCursor
    facts: _SavedFacts
    stopped: _SavedStop | None = None
    stop_asked: str | None = None
    metrics: dict[str, Any] = msgspec.field(default_factory=dict)


class _Launch(msgspec.Struct):
    """`RUN/watch/launch.json`:

        {"launch": "6f2c0a...", "starts": [0, 1, 1], "refused": null}

    Here the first start ended with one diagnosis, the second without one, and the third is on its
    way."""

    launch: str
    """Its name."""

    starts: list[int]
    """The number of its diagnoses at each of its starts."""

    refused: dict[str, Any] | None = None
    """What `look_back` returned when a restart was refused."""


def begin_launch(folder: RunFolder, ddp: RunManager) -> dict[str, Any] | None:
    """Collective: at a restart that would fail again all ranks raise the same error. Rank 0 gets
    the failure that ended the previous start, for `report_recovery`."""
    past: Any = look_back(folder, is_restart=ddp.is_restart) if ddp.is_main_process() else None
    past = broadcast_json(past)
    if past["refusal"] is not None:
        what, next_step = past["refusal"]
        # The place is where it failed; the error is raised on every rank.
        raise HangError(what, next_step=next_step, place=Place(**past["place"]))

    failure: dict[str, Any] | None = past["failure"]
    return failure if ddp.is_main_process() else None


def look_back(folder: RunFolder, *, is_restart: bool) -> dict[str, Any]:
    """On rank 0: `refusal` (what and next, or None), its `place`, and `failure`: the new one since
    the last start. The number of diagnoses at this start is recorded for the next one."""
    launch = _read_launch(folder.launch_file) if is_restart else None
    launch = launch or _Launch(uuid.uuid4().hex, [])
    if launch.refused is not None:  # torchrun restarts anyway
        return launch.refused

    diagnoses = diagnoses_of_launch(folder.diagnoses, launch.launch) if launch.starts else []
    launch.starts.append(len(diagnoses))

    of_starts = [diagnoses[begin:end] for begin, end in pairwise(launch.starts)]
    causes = [_first_cause(of_start) for of_start in of_starts if of_start]

    has_new_failure = bool(of_starts and of_starts[-1])
    past: dict[str, Any] = {
        "refusal": check_same_step(causes, folder.diagnoses),
        "failure": _failure_in(causes[-1]) if has_new_failure else None,
    }

    if past["refusal"] is not None:
        diagnosis = causes[-1]["diagnosis"]
        past["place"] = {name: diagnosis[name] for name in ("host", "rank", "step")}
        # It is final, whatever a sidecar diagnoses later.
        launch.refused = past

    make_own_folder(folder.launch_file.parent)
    write_whole(folder.launch_file, json.dumps(msgspec.to_builtins(launch)) + "\n")
    return past


def diagnoses_of_launch(folder: Path, launch: str) -> list[DiagnosisRecord]:
    """The diagnoses that ended a start of this launch, the newest last, without those that were
    only reported."""
    return [
        record
        for record in read_diagnoses(folder)
        if record["launch"] == launch and has_ended_ranks(record["alarm"], record["action"])
    ]


def _first_cause(of_start: Sequence[DiagnosisRecord]) -> DiagnosisRecord:
    """One start may have several diagnoses: in a network partition each side makes its own. The
    first is the cause, but for a kill of our own, which follows from another failure."""
    for record in of_start:
        if record["diagnosis"]["cause"] != Cause.ENDED:
            return record

    return of_start[0]


def check_same_step(diagnoses: Sequence[DiagnosisRecord], folder: Path) -> tuple[str, str] | None:
    """From the diagnoses that ended starts: why not to restart, and what to do instead; None:
    restart."""
    if not diagnoses:
        return None

    last = diagnoses[-1]
    step = last["diagnosis"]["step"]
    next_step = f"read {folder} and fix the cause, then rerun the same command to resume from the newest checkpoint"

    if last["action"] == "stop":
        at_step = "" if step is None else f" at step {step}"
        what = last["diagnosis"]["what"]
        return f"the run was stopped{at_step} and is not restarted: {what}", next_step

    if step is None:
        return None

    failures = [
        str(record["diagnosis"]["what"])
        for record in diagnoses
        if record["diagnosis"]["step"] == step and record["diagnosis"]["cause"] != Cause.ENDED
    ]

    if len(failures) < MOST_AT_ONE_STEP:
        return None

    heading = f"the run has failed {len(failures)} times at step {step} and is not restarted:"
    return as_list(heading, failures), next_step


def _failure_in(record: DiagnosisRecord) -> dict[str, Any]:
    """The failure in a diagnosis. Times are Unix seconds; `rank` is None if it is the whole host.

    {"cause": ..., "rank": 3, "host": "gpu-02", "step": 1841, "failed_at": ..., "diagnosed_at": ...}
    """
    diagnosis = record["diagnosis"]
    diagnosed_at = float(record["time"])
    return {
        **{name: diagnosis[name] for name in ("cause", "rank", "host", "step")},
        "failed_at": diagnosed_at - float(diagnosis["since_s"]),
        "diagnosed_at": diagnosed_at,
    }


def report_recovery(failure: Mapping[str, Any], reporter: Reporter, *, step: int) -> None:
    """Called after `step`, the first of this start, when the device has finished it.

    {"kind": "recovered", "step": 1801, "cause": ..., "about_rank": 3, "about_host": "gpu-02", "seconds": 41.0,
     "seconds_to_diagnosis": 4.0, "lost_steps": 41}
    """
    lost_steps = None
    if failure["step"] is not None:
        lost_steps = max(0, failure["step"] - (step - 1))

    reporter.report(
        "recovered",
        step=step,
        cause=failure["cause"],
        about_rank=failure["rank"],
        about_host=failure["host"],
        seconds=max(0.0, time.time() - failure["failed_at"]),
        seconds_to_diagnosis=max(0.0, failure["diagnosed_at"] - failure["failed_at"]),
        lost_steps=lost_steps,
    )


def _read_launch(path: Path) -> _Launch | None:
    """None: there is no such file, or it is damaged."""
    try:
        return read_record(_Launch, path)
    except (OSError, ValueError):
        return None


@dataclass(frozen=True)
class FoundCheckpoint:
    """The newest complete and finite checkpoint, and newer ones that were skipped, each with the
    reason."""

    path: Path
    facts: RunFacts
    """What it recorded of the run."""

    progress: Progress
    """The progress of the run when it was saved."""

    skipped: list[tuple[str, str]]
    """Paths and reasons, the newest first."""

    non_finite: str | None
    """If no checkpoint is finite: a non-finite tensor of this one."""


def find_newest(ddp: RunManager, root: Path) -> FoundCheckpoint | None:
    """Collective: the checkpoint to resume from; None: the run starts."""
    answer: Any = _look_for_newest(root) if ddp.is_main_process() else None
    answer = broadcast_json(answer)
    skipped = answer["skipped"]

    path = answer.get("path")
    if path is None:
        if not skipped:
            return None

        raise CheckpointError(
            f"none of the {len(skipped)} checkpoints in {root} is complete; the newest: {skipped[0][1]}",
            next_step="restore one from a backup, or start a new run with --fresh, which moves this one aside",
        )

    saved = answer["progress"]
    progress = Progress(
        saved["step"],
        Cursor(**saved["cursor"]),
        stopped=saved.get("stopped"),
        metrics=saved.get("metrics", {}),
    )

    return FoundCheckpoint(Path(path), saved["facts"], progress, skipped, answer["non_finite"])


def _look_for_newest(root: Path) -> dict[str, Any]:
    """On rank 0: what the others need to know of the newest checkpoint, and of those that were
    skipped."""
    newest, skipped = catalog.newest_valid(root, check_contents)
    answer: dict[str, Any] = {
        "skipped": [(str(checkpoint), reason) for checkpoint, reason in skipped]
    }

    if newest is not None:
        answer["path"] = str(newest)
        answer["progress"] = catalog.read_document(newest, "progress")
        answer["non_finite"] = catalog.check_sizes(newest).non_finite

    return answer


def check_contents(path: Path) -> None:
    """Check what checksums do not show: whoever wrote them may have written anything."""
    snapshot = store.read(path)
    has_tensors = {"model", "optimizer", "rng"} <= snapshot.tensors.keys()
    has_documents = all(
        isinstance(snapshot.documents.get(name), dict)
        for name in ("model", "optimizer", "progress")
    )

    if not has_tensors or not has_documents:
        raise CorruptCheckpointError(
            path, "it does not hold a model, an optimizer, random states and progress"
        )

    try:
        saved = from_json(_SavedProgress, snapshot.documents["progress"])
    except ValueError:
        saved = None

    if saved is None or saved.step != catalog.check_sizes(path).step:
        raise CorruptCheckpointError(path, "progress.json does not have the run's position")

    check_rng_file(path, snapshot.tensors["rng"])


def facts_of(
    request: RunRequest, job: Job, *, before: RunFacts | None = None, step: int = 0
) -> RunFacts:
    """What a checkpoint records about the run, beside its state: what a resumed run compares with
    its own settings. `before`: the same from the checkpoint at `step` that it resumed."""
    settings = flat(request.config)
    history: list[Any] = []
    if before is not None:
        history = _history(before, request, step)

        # As the run began.
        settings["model.init"] = before["config"].get("model.init")
        if request.config.train.step is None:
            settings["train.step"] = before["config"].get("train.step", "eager")

    return {
        "task": request.task,
        "config": settings,
        "world_size": job.ddp.world_size,
        "batch_size": job.batch.size,
        "data": job.data_fingerprint,
        "best_metric": job.task.best_metric,
        "higher_is_better": job.task.higher_is_better,
        "machine": platform_facts(job.ddp.device),
        # The choice of `--train.step auto`: if measured again, it might differ.
        "step": (before or {}).get("step"),
        "history": history,
    }


def _history(before: RunFacts, request: RunRequest, step: int) -> list[Any]:
    """What has changed in the run so far, with an entry for this start if it changes something:

    {"step": 1800, "changed": {"optim.lr": {"from": 0.1, "to": 0.05}}, "optimizer": "reset"}
    """
    history = list(before.get("history", []))
    entry: dict[str, Any] = {"step": step, "changed": {}}
    for name, (old, new) in changed_settings(before, request).items():
        entry["changed"][name] = {"from": old, "to": new}

    resets = resets_optimizer(before, request)
    if resets:
        entry["optimizer"] = "reset"

    if entry["changed"] or resets:
        history.append(entry)

    return history


def changed_settings(before: RunFacts, request: RunRequest) -> dict[str, tuple[Any, Any]]:
    """The settings, with old and new values, that changed since the checkpoint and may change the
    result: `{"optim.lr": (0.1, 0.05)}`."""
    old = before["config"]
    new = flat(request.config)

    auto_by_default = old.get("train.step") is None and before.get("step") is not None
    if new["train.step"] is None or (auto_by_default and new["train.step"] == "auto"):
        # As the run began.
        del new["train.step"]
    elif old.get("train.step") is None:
        old = {**old, "train.step": before.get("step") or "eager"}

    changed = {
        name: (old[name], new[name])
        for name in new
        if name in old and old[name] != new[name] and scope_of(name).changes_result
    }

    # The path of the task's file may have changed.
    old_task = before["task"].rpartition("/")[2]
    new_task = request.task.rpartition("/")[2]
    if old_task != new_task:
        return {"task": (old_task, new_task), **changed}

    return changed


def resets_optimizer(before: RunFacts, request: RunRequest) -> bool:
    """Whether --optim.reset applies now: not if the checkpoint was already trained with it."""
    old = before["config"]
    optim = request.config.optim
    was_reset = old.get("optim.reset", False) and old["optim.name"] == optim.name
    return optim.reset and not was_reset


def check_not_finished(
    before: RunFacts, request: RunRequest, *, step: int, total_steps: int
) -> None:
    """Refuse other settings for a finished run: its result is not theirs."""
    if step < total_steps:
        return

    changed = {
        name: values
        for name, values in changed_settings(before, request).items()
        if scope_of(name).changes_finished_run
    }

    if not changed:
        return

    texts = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changed.items())
    reached = f"has finished at step {step}"
    if not changed.keys().isdisjoint({"train.epochs", "train.steps"}):
        reached = f"is at step {step}, at or after the end that train.epochs or train.steps now set"

    raise UsageError(
        f"the run in {request.run} {reached}, and was trained with other settings: {texts}",
        next_step="start a new run with --fresh (the earlier run is moved aside) or --run DIR; to train further, raise "
        "train.epochs or train.steps",
    )


def check_init(before: RunFacts, request: RunRequest, *, step: int) -> None:
    """Refuse other initial weights for a run that resumes: they would have no effect."""
    init = request.config.model.init
    began_with = before["config"].get("model.init")
    if init not in (None, began_with):
        raise UsageError(
            f"the run in {request.run} began with {began_with or 'random weights'} and resumes from step {step}: "
            f"--model.init {init} would have no effect",
            next_step="leave it out to resume, or start a new run with --fresh (this one is moved aside) or --run DIR",
        )


def changes(before: RunFacts, now: RunFacts, request: RunRequest) -> list[str]:
    """A message for everything that changed since the checkpoint and may change bits: `optim.lr
    changed since the checkpoint: 0.1 -> 0.05`."""
    texts = [
        f"{name} changed since the checkpoint: {old} -> {new}"
        for name, (old, new) in changed_settings(before, request).items()
    ]

    if before["data"] != now["data"]:
        texts.append("the training data changed since the checkpoint")

    if before["world_size"] != now["world_size"] and request.config.train.exact != "elastic":
        texts.append(
            f"the number of ranks changed since the checkpoint: {before['world_size']} -> {now['world_size']}; the "
            "samples are the same, but not the bits (--train.exact elastic keeps both)"
        )
        return texts

    machine = before.get("machine") or now["machine"]
    texts += [
        f"the {name} changed since the checkpoint: {machine.get(name)} -> {value}; bits may differ from here on"
        for name, value in now["machine"].items()
        if machine.get(name) != value
    ]

    return texts


def resume(context: RunContext, checkpoint: FoundCheckpoint) -> None:
    """Collective: continue from this checkpoint, unless the run has finished and its settings have
    changed."""
    request = context.request
    facts = checkpoint.facts
    progress = checkpoint.progress
    check_not_finished(facts, request, step=progress.step, total_steps=context.total_steps)
    check_init(facts, request, step=progress.step)

    with_optimizer = not resets_optimizer(facts, request)
    restore(context.job, checkpoint.path, context.hooks, with_optimizer=with_optimizer)

    context.progress.step = progress.step
    context.progress.cursor = progress.cursor
    context.progress.metrics = progress.metrics
    if progress.step >= context.total_steps:
        context.progress.stopped = progress.stopped

    context.job.loader.cursor = progress.cursor


def report_resume(context: RunContext, checkpoint: FoundCheckpoint, facts: RunFacts) -> None:
    """Report the checkpoint, and what has changed since it was saved: an event with its step and
    path, then a warning for each change."""
    step = checkpoint.progress.step
    for path, reason in checkpoint.skipped:
        context.warn(f"the checkpoint {path} was skipped: {reason}")

    if checkpoint.non_finite is not None:
        context.warn(
            f"no checkpoint is finite: {checkpoint.non_finite} of {checkpoint.path} is not; "
            "start a new run with --fresh"
        )

    context.reporter.report(
        "resume", step=step, epoch=checkpoint.progress.cursor.epoch + 1, path=str(checkpoint.path)
    )

    if context.job.batch.note is not None:
        context.note(context.job.batch.note)
    if resets_optimizer(checkpoint.facts, context.request):
        context.note(f"the optimizer is reset at step {step} (--optim.reset); the weights are kept")

    for change in changes(checkpoint.facts, facts, context.request):
        context.warn(change)


def restore(job: Job, path: Path, hooks: TaskHooks, *, with_optimizer: bool) -> None:
    """Collective: restore the job and the hooks from a checkpoint. `with_optimizer=False`: its
    optimizer stays new."""
    job.heartbeat.mark(Phase.START)

    # What each rank has to itself; rank 0 sends it to them one by one.
    comm = replicas = None
    if job.sharded is not None:
        snapshot = _read_own_shards(job, path)
    else:
        read = None
        if job.ddp.is_main_process():
            read = store.read(path)
            comm = read.tensors.pop(COMM_FILE, {})
            replicas = read.tensors.pop(REPLICAS_FILE, {})

        snapshot = store.broadcast(read)

    if job.comm is not None:
        _restore_comm(job.comm, job.ddp, snapshot.documents, comm)

    _restore_data(job, snapshot)
    saved = _restore_model(job, snapshot, with_optimizer=with_optimizer)

    if job.sync is not None:
        restore_replica(job, job.sync, snapshot, replicas, with_optimizer=with_optimizer)
    if with_optimizer:
        use_own_settings(job, saved.get("group_state"))

    if job.ddp.is_main_process() and "measured" in saved:
        with state.translated("progress"):
            job.meter.put(**saved["measured"])

    hooks.restore(snapshot)
    hooks.run.stop_reason = saved.get("stop_asked")

    # Last: hooks may have drawn random numbers.
    restore_own_rng(snapshot.tensors["rng"], rank=job.ddp.rank, device=job.ddp.device)


def _restore_model(job: Job, snapshot: store.Snapshot, *, with_optimizer: bool) -> dict[str, Any]:
    """Restore the model, the optimizer and the loss scaler. Returns the progress."""
    # An earlier version, which had these two, saved the optimizer's name only in the settings.
    documents = snapshot.documents
    name = documents["progress"]["facts"]["config"]["optim.name"]
    if name in ("sgd", "adamw"):
        documents["optimizer"].setdefault("class", optimizer_class(name).__name__)

    try:
        optimizer = job.optimizer if with_optimizer else None
        return state.restore(snapshot, job.model, optimizer, scaler=job.scaler)
    except CheckpointMismatchError as error:
        instead = NEW_RUN
        if isinstance(error, OptimizerMismatchError):
            instead = "reset the optimizer and keep the weights with --optim.reset"

        error.next_step = f"{error.next_step}, or {instead}"
        raise


def _read_own_shards(job: Job, path: Path) -> store.Snapshot:
    """Collective: every rank reads its own rows from the folder."""
    snapshot = store.Snapshot({}, {})
    problem = None
    try:
        snapshot = store.read(path)
    except CorruptCheckpointError as error:
        problem = error.reason

    for rank, (host, reason) in enumerate(gather_json([job.ddp.host, problem])):
        if reason is not None:
            raise CheckpointError(
                f"rank {rank} on {host} cannot read the checkpoint {path}: {reason}",
                next_step="give a --run on a volume that all nodes share: each rank reads its own shards",
            )

    parameters = sharded_parameters(job.model)
    for file in {"model", "optimizer", HOOKS_FILE} & snapshot.tensors.keys():
        snapshot.tensors[file] = own_shards(snapshot.tensors[file], parameters)

    return snapshot


def use_own_settings(job: Job, group_state: list[list[str]] | None) -> None:
    """Give the optimizer the settings of this start, but for what it had changed itself. Its rate
    is set before each step. None: a checkpoint of an earlier version, which did not record it."""
    groups = job.optimizer.param_groups
    names_by_group = group_state or [[]] * len(groups)
    with state.translated("progress"):
        triples = zip(groups, job.group_settings, names_by_group, strict=True)
        for group, settings, changed_names in triples:
            for name, value in settings.items():
                if name not in changed_names:
                    group[name] = value


def _restore_comm(
    comm: PowerSGD,
    ddp: RunManager,
    documents: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | None,
) -> None:
    """Collective: restore this rank's state of PowerSGD from rank 0's `tensors`: what it has not
    sent yet."""
    with state.translated(COMM_FILE):
        saved = documents.get(COMM_FILE, {"ranks": []})["ranks"]
        errors: Mapping[int, Any] = {}
        if len(saved) == ddp.world_size:
            errors = sent_state(dict(enumerate(saved)), ddp.rank, tensors)

        comm.load_state_dict(errors, step=documents["progress"]["step"])

    if saved and len(saved) != ddp.world_size and ddp.is_main_process():
        log.warning(
            f"PowerSGD's error feedback is that of {len(saved)} ranks: on {ddp.world_size} it begins anew"
        )


def _restore_data(job: Job, snapshot: store.Snapshot) -> None:
    """Restore the position of this rank's dataset, if it keeps one."""
    document = snapshot.documents.get(DATA_FILE)
    if document is None:
        return

    # A rank that did not exist when it was saved gets another's state, which its loader refuses, as
    # all loaders then do.
    tensors = snapshot.tensors.get(DATA_FILE, {})
    job.loader.load_stream_state(state_of_rank(document, tensors, job.ddp.rank))

"""What a checkpoint remembers of the run that made it, and what has changed when it is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drumline.distributed.determinism import machine_facts
from drumline.engine.job import Job, flat
from drumline.engine.request import Request
from drumline.errors import UsageError

# Settings that say how a run is watched and kept, not what it computes.
FREE_TO_CHANGE = (
    "log.",
    "checkpoint.",
    "watch.",
    "dist.device",  # the machine's facts tell
    "dist.threads",
    "dist.same_code",
    "dist.start_timeout_s",
    "dist.train_timeout_s",
    "data.dir",
    "data.workers",
    "data.pin_memory",
    "data.persistent",
    "data.prefetch",
    "data.resident",
    "optim.reset",
)


def facts_of(
    request: Request, job: Job, *, before: Mapping[str, Any] | None = None, step: int = 0
) -> dict[str, Any]:
    """What a checkpoint remembers of the run, for whoever resumes it. `before`: what the one of `step` did."""
    return {
        "task": request.task,
        "config": flat(request.config),
        "world_size": job.ddp.world_size,
        "batch_size": job.batch.size,
        "data": job.data_fingerprint,
        "machine": machine_facts(job.ddp.device),
        # What `--train.step auto` has come to: measured again, it might come to another.
        "step": (before or {}).get("step"),
        "history": [] if before is None else [*before.get("history", []), *_entry(before, request, step)],
    }


def changed_settings(before: Mapping[str, Any], request: Request) -> dict[str, tuple[Any, Any]]:
    """The settings by name, from -> to, that are not those of the checkpoint and may change what comes of the run."""
    old, new = before["config"], flat(request.config)
    changed = {
        name: (old[name], new[name])
        for name in new
        if name in old and old[name] != new[name] and not name.startswith(FREE_TO_CHANGE)
    }
    # The task's file may be named by another path.
    tasks = (before["task"].rpartition("/")[2], request.task.rpartition("/")[2])
    return changed if tasks[0] == tasks[1] else {"task": tasks, **changed}


def resets_optimizer(before: Mapping[str, Any], request: Request) -> bool:
    """Whether the optimizer starts anew: asked for now, and not yet of this one when the checkpoint was made."""
    old, optim = before["config"], request.config.optim
    return optim.reset and not (old.get("optim.reset", False) and old["optim.name"] == optim.name)


def _entry(before: Mapping[str, Any], request: Request, step: int) -> list[dict[str, Any]]:
    """What this start adds to the history of settings: nothing, if it changes none."""
    changed = {
        name: {"from": old, "to": new} for name, (old, new) in changed_settings(before, request).items()
    }
    reset = {"optimizer": "reset"} if resets_optimizer(before, request) else {}
    return [{"step": step, "changed": changed, **reset}] if changed or reset else []


def check_not_finished(before: Mapping[str, Any], request: Request, *, step: int, total_steps: int) -> None:
    """Refuse to show the result of a run that has finished as that of other settings."""
    changed = changed_settings(before, request)
    changed.pop("train.on_nan", None)
    if step < total_steps or not changed:
        return
    texts = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changed.items())
    reached = f"has finished at step {step}"
    if not changed.keys().isdisjoint({"train.epochs", "train.steps"}):
        reached = f"has reached step {step}, where train.epochs or train.steps now ends it or before"
    raise UsageError(
        f"the run in {request.run} {reached}, and was trained with other settings: {texts}",
        next_step="--fresh starts anew (the earlier run is moved aside), --run DIR trains in another folder; to train "
        "further, raise train.epochs or train.steps",
    )


def changes(before: Mapping[str, Any], now: Mapping[str, Any], request: Request) -> list[str]:
    """What is not as it was when the checkpoint was made."""
    texts = [
        f"{name} changed since the checkpoint: {old} -> {new}"
        for name, (old, new) in changed_settings(before, request).items()
    ]
    if before["data"] != now["data"]:
        texts.append("the training data changed since the checkpoint")
    if before["world_size"] != now["world_size"] and request.config.train.exact != "elastic":
        texts.append(
            f"the number of ranks changed since the checkpoint: {before['world_size']} -> {now['world_size']}; the "
            "same samples, but not the same bits (--train.exact elastic has both)"
        )
        return texts
    machine = before.get("machine", now["machine"])
    texts += [
        f"the {name} changed since the checkpoint: {machine.get(name)} -> {value}; bits may differ from here on"
        for name, value in now["machine"].items()
        if machine.get(name) != value
    ]
    return texts

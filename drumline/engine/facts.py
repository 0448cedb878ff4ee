"""What a checkpoint remembers of the run that made it, and what has changed when it is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drumline.distributed.determinism import machine_facts
from drumline.engine.job import Job, flat
from drumline.engine.request import Request

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
)


def facts_of(request: Request, job: Job) -> dict[str, Any]:
    """What a checkpoint remembers of the run, for whoever resumes it."""
    return {
        "task": request.task,
        "config": flat(request.config),
        "world_size": job.ddp.world_size,
        "batch_size": job.batch.size,
        "data": job.data_fingerprint,
        "machine": machine_facts(job.ddp.device),
    }


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is not as it was when the checkpoint was made."""
    old, new = before["config"], now["config"]
    texts = [
        f"resumed with another {name}: {old[name]} before, {new[name]} now"
        for name in new
        if name in old and old[name] != new[name] and not name.startswith(FREE_TO_CHANGE)
    ]
    if before["task"] != now["task"]:
        texts.append(f"the run was saved by the task {before['task']} and goes on with {now['task']}")
    if before["data"] != now["data"]:
        texts.append("the training data is not what it was when the run was saved")
    if before["world_size"] != now["world_size"] and new["train.exact"] != "elastic":
        texts.append(
            f"the run was saved on {before['world_size']} ranks and goes on with {now['world_size']}: the same "
            "samples, but not the same bits (--train.exact elastic has both)"
        )
        return texts
    machine = before.get("machine", now["machine"])
    texts += [
        f"the run was saved with another {name} ({machine.get(name)}, now {value}): its bits may differ from here on"
        for name, value in now["machine"].items()
        if machine.get(name) != value
    ]
    return texts

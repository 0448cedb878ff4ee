"""A run that its launcher has restarted: whether that makes sense, and how long it took from the failure to a step.

Diagnoses of the sidecars are in `RUN/diagnoses`, each with the launch that it is about. `RUN/watch/launch.json` says
which launch this is: rank 0 draws a new name at a first start and keeps it at a restart, whatever the launcher is.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from drumline.distributed.collectives import broadcast_json
from drumline.engine.run_folder import RunFolder, write_whole
from drumline.errors import HangError, Place, as_list
from drumline.manager import DDPManager
from drumline.metrics.events import Reporter
from drumline.untrusted import make_own_folder, parse_json, read_regular
from drumline.watch.diagnosis.diagnosis_files import read_diagnoses

MOST_AT_ONE_STEP = 3


@dataclass(frozen=True, kw_only=True)
class EarlierFailure:
    """What ended the start before this one. Times are Unix seconds."""

    cause: str
    rank: int | None
    """None: the whole host."""
    host: str
    step: int | None
    failed_at: float
    diagnosed_at: float

    def report(self, reporter: Reporter, *, step: int) -> None:
        """After `step`, the first of this start, once the device has finished it."""
        reporter.report(
            "recovered",
            step=step,
            cause=self.cause,
            told_rank=self.rank,
            told_host=self.host,
            seconds=max(0.0, time.time() - self.failed_at),
            seconds_to_diagnosis=max(0.0, self.diagnosed_at - self.failed_at),
            lost_steps=None if self.step is None else max(0, self.step - (step - 1)),
        )


@dataclass(frozen=True)
class _Launch:
    """What `launch.json` holds."""

    launch: str
    """Its name."""
    starts: list[int] = field(default_factory=list)
    """How many diagnoses of it there were at each of its starts."""
    refused: dict[str, Any] | None = None
    """What was found when a restart was refused; that is final, whatever a sidecar makes of the refusal."""


def begin_launch(folder: RunFolder, ddp: DDPManager) -> EarlierFailure | None:
    """Collective: at a restart all ranks refuse together what would fail again. Rank 0 gets what happened."""
    found: dict[str, Any] | None = None
    if ddp.is_main_process():
        found = look_back(folder, is_restart=ddp.is_restart)
    found = broadcast_json(found, device=ddp.device)
    assert found is not None
    if found["refusal"] is not None:
        what, next_step = found["refusal"]
        # The place is where it failed; the refusal is raised on every rank.
        raise HangError(what, next_step=next_step, place=Place(**found["place"]))
    return EarlierFailure(**found["failure"]) if found["failure"] and ddp.is_main_process() else None


def look_back(folder: RunFolder, *, is_restart: bool) -> dict[str, Any]:
    """On rank 0: `refusal` (what and next, or None), its `place`, and `failure`: what is new since the last start."""
    launch = (_read_launch(folder.launch_file) if is_restart else None) or _Launch(uuid.uuid4().hex)
    if launch.refused is not None:  # torchrun tries again all the same
        return launch.refused
    starts = launch.starts
    diagnoses = diagnoses_of_launch(folder.diagnoses, launch.launch) if starts else []
    launch = replace(launch, starts=[*starts, len(diagnoses)])
    # One start may have ended with several: in a network partition each side makes its own. The first is the cause.
    by_start = [diagnoses[begin:end] for begin, end in pairwise(launch.starts) if end > begin]
    last = by_start[-1][0] if by_start else None
    is_new = bool(starts) and len(diagnoses) > starts[-1]
    found = {
        "refusal": check_same_step([some[0] for some in by_start], folder.diagnoses),
        "place": {} if last is None else {name: last["diagnosis"][name] for name in ("host", "rank", "step")},
        "failure": asdict(_failure_in(last)) if last is not None and is_new else None,
    }
    make_own_folder(folder.launch_file.parent)
    launch = replace(launch, refused=found if found["refusal"] else None)
    write_whole(folder.launch_file, json.dumps(asdict(launch)) + "\n")
    return found


def diagnoses_of_launch(folder: Path, launch: str) -> list[dict[str, Any]]:
    """Those that ended a start of this launch, the newest last; not those that were only reported."""
    return [
        record
        for record in read_diagnoses(folder)
        if record.get("launch") == launch
        and (record["alarm"] == "failure" or (record["alarm"] == "hang" and record["action"] != "report"))
    ]


def check_same_step(diagnoses: Sequence[Mapping[str, Any]], folder: Path) -> tuple[str, str] | None:
    """From the diagnoses that starts ended with: why not to restart, and what to do instead; None: restart."""
    if not diagnoses:
        return None
    last = diagnoses[-1]
    step = last["diagnosis"]["step"]
    next_step = f"see {folder} and fix the cause, then rerun the same command to resume from the newest checkpoint"
    if last["action"] == "stop":
        at = "" if step is None else f" at step {step}"
        return f"the run was stopped{at} and is not restarted: {last['diagnosis']['what']}", next_step
    same = [record for record in diagnoses if step is not None and record["diagnosis"]["step"] == step]
    if len(same) < MOST_AT_ONE_STEP:
        return None
    heading = f"the run has failed {len(same)} times at step {step} and is not restarted:"
    return as_list(heading, [str(record["diagnosis"]["what"]) for record in same]), next_step


def _failure_in(record: Mapping[str, Any]) -> EarlierFailure:
    diagnosis, diagnosed_at = record["diagnosis"], float(record["time"])
    return EarlierFailure(
        cause=str(diagnosis["cause"]),
        rank=diagnosis["rank"],
        host=diagnosis["host"],
        step=diagnosis["step"],
        failed_at=diagnosed_at - float(diagnosis["since_s"]),
        diagnosed_at=diagnosed_at,
    )


def _read_launch(path: Path) -> _Launch | None:
    try:
        record = parse_json(read_regular(path))
        starts, refused = record["starts"], record["refused"]
        if not all(type(number) is int for number in starts) or not isinstance(refused, dict | None):
            return None
        return _Launch(str(record["launch"]), starts, refused)
    except (OSError, ValueError, KeyError, TypeError):
        return None

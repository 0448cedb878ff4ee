"""The mirror of a run (`--checkpoint.mirror`): restored from at the start, made for the saver on
rank 0."""

from __future__ import annotations

from concurrent.futures import wait
from typing import Literal

from drumline.base.background import in_background
from drumline.base.errors import UsageError
from drumline.base.text import print_message
from drumline.checkpoint.mirror import Mirror, restore_run
from drumline.checkpoint.mirrored_run import MirroredRun
from drumline.rank.collectives import broadcast_json
from drumline.runs.run_folder import RunFolder
from drumline.storage.object_store import open_store
from drumline.training.manager import RunManager
from drumline.training.run_context import RunContext, RunRequest
from drumline.watch.heartbeat import Phase

Message = tuple[Literal["note", "warning"], str]
# Other ranks wait in one collective after another, so that a long download meets no timeout.
POLL_S = 2.0


def make_mirror(context: RunContext, url: str) -> Mirror:
    """On rank 0, which sees the files of all ranks that write."""
    return Mirror(
        MirroredRun(open_store(url)),
        context.folder.path,
        retention=context.retention,
        note=context.note,
        mirrored=lambda step: context.reporter.report("mirrored", newest=step),
        # Or the watchdog would report a stall.
        alive=lambda: context.job.heartbeat.mark(Phase.SAVE),
    )


def refuse_used_mirror(request: RunRequest) -> None:
    """For --fresh: what an earlier run has mirrored is neither resumed nor deleted."""
    if (run := _run_of(request)).has_any():
        raise UsageError(
            f"--fresh starts a new run, and the mirror {run.store} holds an earlier one",
            next_step="give --checkpoint.mirror another prefix, or delete what is there",
        )


def restore_from_mirror(request: RunRequest, folder: RunFolder, ddp: RunManager) -> list[Message]:
    """Collective: if the run folder has no checkpoint, rank 0 fetches the newest one of the mirror.
    Returns what to report, on rank 0."""
    if not ddp.is_main_process():
        while not broadcast_json(None):
            pass
        return []

    run = _run_of(request)
    work = in_background(lambda: restore_run(run, folder.path))
    if not wait([work], timeout=POLL_S).done:
        print_message(f"reading the mirror {run.store}")

    while not work.done():
        broadcast_json(False)
        wait([work], timeout=POLL_S)

    note, skipped = work.result()
    broadcast_json(True)

    messages: list[Message] = [("warning", reason) for reason in skipped]
    if note:
        messages.append(("note", note))

    return messages


def _run_of(request: RunRequest) -> MirroredRun:
    """The run's place in the store, of the settings."""
    return MirroredRun(open_store(str(request.config.checkpoint.mirror)))

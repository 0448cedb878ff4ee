"""What ssh starts on a node for the commands about detached jobs: `python -m
drumline.launch.detached.host_service`, without torch.

It reads one request from stdin, which starts, lists, follows or stops jobs of this user on this
machine, and answers with frames on its stdout.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, BinaryIO

from drumline.base.errors import DrumlineError, ExitCode
from drumline.base.processes import EXITED, Termination, send_signal, state_of
from drumline.base.untrusted import from_json, parse_json
from drumline.launch.detached import units
from drumline.launch.detached.job_folder import (
    DOWN,
    ENDED,
    STARTING,
    JobFolder,
    JobRecord,
    JobSpec,
    JobState,
    folders_of,
    jobs_folder,
    machine_id,
    remove_old,
    unreadable,
    wrong_job_name,
)
from drumline.launch.detached.keeper import STOP_SIGNALS, STOPPED
from drumline.launch.node.guard import job_processes
from drumline.launch.node_plan import NodePlan, Program
from drumline.launch.ssh.node_output import NodeOutput
from drumline.launch.ssh.supervisor import (
    PROTOCOL,
    ControllerLink,
    accept_or_refuse,
    serve,
)
from drumline.net.frames import MAX_PIPE_BYTES, LineBuffer, Message

# How long it may take until there is a process of the keeper.
START_S = 10.0
# How often a command that follows or stops a job looks whether its keeper runs.
CHECK_S = 2.0


def _answer(request: Message, link: ControllerLink) -> None:
    """Do what a request asks for; what is wrong is the answer."""
    actions = {"launch": _launch, "list": _list, "follow": _follow, "stop": _stop}
    try:
        actions[request["action"]](request, link)
    except DrumlineError as error:
        link.out.send("refused", problems=[[error.what, error.next_step or ""]])
    except (OSError, ValueError) as error:
        what = f"the folder of the job: {error}"
        link.out.send("refused", problems=[[what, "check who owns it, and the disk"]])


# Start


def _launch(request: Message, link: ControllerLink) -> None:
    """Check what can be checked, and start the keeper when all hosts have answered."""
    if wrong := wrong_job_name(request["name"]):
        raise DrumlineError(wrong)
    if not accept_or_refuse(request, link):
        return

    start = _wait_for_start(link)
    if start is None:
        return

    node = from_json(NodePlan, start["node"])
    folder = JobFolder(jobs_folder(os.environ) / request["name"] / f"node-{node.node_rank}")
    spec = JobSpec(
        name=request["name"],
        machine=socket.gethostname(),
        hosts=tuple(start["hosts"]),
        launched_at=time.time(),
        cwd=str(Path.cwd()),
        keep_going=request["keep_going"],
        node=node,
        program=from_json(Program, request["program"]),
        frame={**request, "node": start["node"]},
        variables=units.lasting_variables(os.environ),
        machine_id=machine_id(),
    )
    folder.create(spec)
    remove_old(jobs_folder(os.environ))
    notice = units.start_keeper(folder, grace_s=request["grace_s"])
    _wait_for_keeper(folder, link)
    if notice:
        link.out.send("notice", text=f"warning: {notice}")
    link.out.send("ended", code=0, last_lines=[])


def _wait_for_start(link: ControllerLink) -> Message | None:
    """None: the launch ended before it."""
    while link.is_alive:
        for frame in link.read():
            if frame["kind"] == "start":
                return frame
            if frame["kind"] == "end":
                return None
    return None


def _wait_for_keeper(folder: JobFolder, link: ControllerLink) -> None:
    """As long as it loads: its Python may be on a slow disk."""
    until = time.monotonic() + START_S
    keepers: list[int] = []
    while link.is_alive and not folder.has_keeper() and folder.state().state == STARTING:
        # A process that becomes another program has no command for a moment.
        keepers = keepers or units.keepers(folder)
        have_ended = all(state_of(keeper) in EXITED for keeper in keepers)
        if have_ended and (keepers or time.monotonic() > until):
            raise _not_started(folder)
        link.read()


def _not_started(folder: JobFolder) -> DrumlineError:
    """Why the keeper ended at once: the last line of its log."""
    units.remove(folder, stops=True)
    reason = "no reason is known"
    with suppress(OSError, IndexError):
        reason = folder.log.read_text(errors="replace", encoding="utf-8").strip().splitlines()[-1]
    return DrumlineError(
        f"the job's keeper did not start: {reason}",
        next_step=f"read {folder.log}, and `journalctl --user --unit {folder.unit}`",
    )


# List


def _list(request: Message, link: ControllerLink) -> None:
    """Answer with a frame for each node of a job on this machine."""
    link.out.send("hello", protocol=PROTOCOL)
    problems: list[str] = []
    for folder in folders_of(jobs_folder(os.environ), request["name"], problems):
        try:
            record = _record(folder)
        except FileNotFoundError:  # it was removed meanwhile
            continue
        except (OSError, ValueError) as error:
            problems.append(unreadable(folder.path, error))
            continue
        link.out.send("job", **asdict(record))
    for problem in problems:
        link.out.send("notice", text=f"warning: {problem}")
    link.out.send("ended", code=0, last_lines=[])


def _record(folder: JobFolder) -> JobRecord:
    """What the folder says, or that its keeper does not run although the job has not ended."""
    spec = folder.spec()
    state = folder.state()
    if state.state != ENDED and not folder.has_keeper():
        reasons = [f"the job does not run on {spec.machine}: its keeper was ended", state.why]
        state = replace(state, state=DOWN, why="; ".join(filter(None, reasons)))
    return JobRecord(
        name=spec.name,
        hosts=spec.hosts,
        node=spec.node,
        program=spec.program,
        state=state.state,
        why=state.why,
        code=state.code,
        step=state.reached_step,
        since=spec.launched_at,
        logs=str(Path(spec.cwd, spec.frame["logs"])),
        run=str(Path(spec.cwd, spec.program.run)) if spec.program.run else "",
        is_json=spec.is_json,
    )


def _only_folder(request: Message) -> JobFolder:
    """Of the job that is named. A machine has one node of a job."""
    name = request["name"]
    folders = folders_of(jobs_folder(os.environ), name)
    if not folders:
        raise DrumlineError(
            f"there is no job {name} on {socket.gethostname()}",
            next_step="drumline jobs --hosts ... lists those of the hosts",
        )
    return folders[0]


# Follow


def _follow(request: Message, link: ControllerLink) -> None:
    """Send what has happened so far, then what happens, until the job has ended."""
    folder = _only_folder(request)
    spec = folder.spec()
    with suppress(OSError):  # without it there are no lines
        os.chdir(spec.cwd)
    output = NodeOutput(spec.frame, link.out, from_end=False)
    link.out.send("hello", protocol=PROTOCOL)
    lines = LineBuffer(MAX_PIPE_BYTES)
    state = ""
    checked_at = 0.0
    with folder.frames.open("rb") as file:
        while link.is_alive:
            for frame in _new_frames(file, lines):
                if frame["kind"] == "started":
                    output.follow(frame["ranks"], frame["start"])
                if frame["kind"] == "ended":
                    output.send_news(is_last=True)
                link.out.send(**frame)
                if frame["kind"] == "ended":
                    return

            output.send_news()
            link.read()
            if time.monotonic() - checked_at < CHECK_S:
                continue

            checked_at = time.monotonic()
            state_before = state
            record = _record(folder)
            state = record.state
            if state == DOWN != state_before:
                link.out.send("notice", text=f"warning: {record.why}")
            # a full disk had no space for the last frame
            if state == ENDED == state_before:
                link.out.send("ended", code=record.code, last_lines=[], end_reason=record.why)
                return


def _new_frames(file: BinaryIO, lines: LineBuffer) -> Iterator[dict[str, Any]]:
    """What was added to the file since the last call."""
    lines.add(file.read(MAX_PIPE_BYTES))
    while (line := lines.pop()) is not None:
        with suppress(ValueError):
            yield parse_json(line)


# Stop


def _stop(request: Message, link: ControllerLink) -> None:
    """Have the keeper end the job; where it does not run, end what is left of it."""
    folder = _only_folder(request)
    link.out.send("hello", protocol=PROTOCOL)
    state = folder.state()
    signalled: set[int] = set()
    checked_at = float("-inf")
    while link.is_alive and state.state != ENDED:
        # the system may have started another keeper
        if time.monotonic() - checked_at > CHECK_S:
            checked_at = time.monotonic()
            keepers = set(units.keepers(folder))
            send_signal(keepers - signalled, STOP_SIGNALS[request["save"]])
            signalled |= keepers
        with folder.held() as is_free:
            state = _end_without_keeper(folder, link) if is_free else folder.state()
        link.read()

    if state.state == ENDED:
        link.out.send("ended", code=state.code, last_lines=[], end_reason=state.why)


def _end_without_keeper(folder: JobFolder, link: ControllerLink) -> JobState:
    """Take the place of the keeper that does not run: end its processes, and record that."""
    from drumline.launch.detached.keeper import Keeper

    keeper = Keeper(folder)
    if keeper.state.state == ENDED:
        return keeper.state  # its keeper has ended it meanwhile
    attempt = keeper.state.attempt
    if attempt:
        Termination(lambda: job_processes(attempt), 0).wait()
    keeper.end(ExitCode.INTERRUPTED, STOPPED)
    units.remove(folder, stops=True)
    if keeper.unrecorded:
        link.out.send("notice", text=f"warning: {keeper.unrecorded}")
    return keeper.state


if __name__ == "__main__":
    sys.exit(serve(_answer))

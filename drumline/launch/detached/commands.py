"""What `drumline launch --detach`, `jobs`, `attach` and `stop` do: they connect to the hosts as a
launch does, and leave the job to its keepers."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from drumline.base.errors import DrumlineError, ExitCode, PreflightError, UsageError
from drumline.base.json_output import FORMAT, is_wrapped, wrap_output
from drumline.base.text import plural
from drumline.base.untrusted import from_json
from drumline.launch.detached.job_folder import JobRecord
from drumline.launch.hosts import Host
from drumline.launch.node_plan import NodePlan, Program
from drumline.launch.ssh.client import remote_module
from drumline.launch.ssh.controller import OTHER_VERSION, Controller
from drumline.launch.ssh.hosts_job import HostsJob
from drumline.launch.ssh.hosts_launcher import SIGNALS, conclude, handling, with_screen
from drumline.launch.ssh.remote import Remote
from drumline.launch.ssh.screen import Screen
from drumline.launch.ssh.supervisor import PROTOCOL

SERVICE = "drumline.launch.detached.host_service"
THIS_MACHINE = Host("localhost")


@dataclass(frozen=True, kw_only=True)
class DetachedJob(HostsJob):
    """A launch whose nodes run on without it."""

    program_there: ClassVar[str] = SERVICE
    name: str

    def spec(self, node: NodePlan) -> dict[str, Any]:
        """What a keeper needs beside what a supervisor gets."""
        return {
            **super().spec(node),
            "action": "launch",
            "name": self.name,
            "keep_going": self.keep_going,
            "is_json": is_wrapped(),
        }


@dataclass(frozen=True, kw_only=True)
class Question(HostsJob):
    """A request about jobs, which is the same for all hosts."""

    program_there: ClassVar[str] = SERVICE
    request: Mapping[str, Any]
    nodes: Sequence[NodePlan] = (NodePlan(),)
    program: Program = field(default_factory=lambda: Program(()))
    job: str = ""
    cwd: Path = Path("/")
    logs: Path = Path()
    grace_s: float = 0.0

    def spec(self, node: NodePlan) -> dict[str, Any]:
        """The request; a host has no node of its own here."""
        return {"kind": "spec", "protocol": PROTOCOL, **self.request}

    def supervisor_command(self, host: Host) -> list[str]:
        """Without ssh on this machine."""
        if host is THIS_MACHINE:
            return ["env", *remote_module(SERVICE, sys.executable, self.python_path)]
        return super().supervisor_command(host)

    def about(self, request: Mapping[str, Any], hosts: Sequence[Host]) -> Question:
        """Another request to these hosts, some of which have answered one."""
        return replace(self, request=request, hosts=hosts, nodes=[NodePlan()] * len(hosts))


class Conversation(Controller):
    """Asks all hosts; one that cannot be reached does not affect the others."""

    def __init__(self, job: HostsJob, screen: Screen) -> None:
        super().__init__(job, screen)
        self.records: dict[Host, list[JobRecord]] = {}
        self.errors: dict[Host, DrumlineError] = {}

    def _receive(self, remote: Remote, frame: Mapping[str, Any]) -> None:
        """Note the answers; nothing that a host sends ends or starts anything here."""
        match frame["kind"]:
            case "job":
                with contextlib.suppress(ValueError):
                    record = from_json(JobRecord, frame)
                    self.records.setdefault(remote.host, []).append(record)
            case "refused":
                what, next_step = next(iter(frame["problems"]), OTHER_VERSION)
                error = PreflightError(f"{remote.name}: {what}", next_step=next_step)
                self.errors[remote.host] = error
            case "notice":
                self.screen.report(f"{remote.name}: {frame['text']}", is_error=True)

    def _lost(self, remote: Remote) -> None:
        """Note why there is no answer, or no whole one."""
        self.errors[remote.host] = self._loss_of(remote)
        self.dropped.append(remote)


# Launch


def launch_detached(job: HostsJob, program_name: str, follow: Sequence[str]) -> int:
    """Hand the job to its hosts; the exit code, when everything is printed. `follow`: of
    `follow_command`."""
    name = f"{program_name[:60] or 'job'}-{job.job[:6]}"
    detached = DetachedJob(**vars(job), name=name)
    return with_screen(lambda screen: _launch(detached, screen, follow))


def follow_command(follow: Sequence[str], verb: str, job: str, hosts: Sequence[Host]) -> str:
    """The command that shows or stops a job. `follow`: its words, of which `{verb}`, `{job}` and
    `{hosts}` are replaced."""
    words = {"{verb}": verb, "{job}": job, "{hosts}": ",".join(map(str, hosts))}
    return shlex.join(words.get(word, word) for word in follow)


async def _launch(job: DetachedJob, screen: Screen, follow: Sequence[str]) -> int:
    """Start the keepers on all hosts, or on none: where one cannot start, the others are stopped."""
    controller = Controller(job, screen)
    with handling(SIGNALS, controller.interrupted):
        await controller.run()
        await controller.close()

    hosts = [remote.host for remote in controller.remotes]
    has_started = all(remote.code == 0 for remote in controller.remotes)
    if has_started and controller.end_signal is None:
        screen.report(
            f"{job.name} runs on {plural(len(hosts), 'host')}; logs in {job.logs} on each"
        )
        for verb in ("attach", "stop"):
            screen.report(f"{verb}: {follow_command(follow, verb, job.name, hosts)}")
        return ExitCode.SUCCESS

    if controller.has_started:
        question = Question(
            hosts=hosts,
            nodes=job.nodes,
            client=job.client,
            python=job.python,
            python_path=job.python_path,
            request={"action": "stop", "name": job.name, "save": False},
        )
        await _ask(question, screen)

    if controller.lost:
        screen.report_last(f"error: {controller.lost}", "try: the same command again")
    return conclude(controller) or ExitCode.PREFLIGHT_FAILED


# List, stop and attach


def list_jobs(question: Question) -> Conversation:
    """What the hosts answer."""
    return with_screen(lambda screen: _ask(question, screen))


def stop_job(question: Question, name: str, *, save: bool) -> int:
    """End it on all of its hosts."""

    async def stop(screen: Screen) -> int:
        """Find all hosts of the job, ask them, and report how it ended."""
        hosts, _ = await _hosts_of(question, name, screen)
        request = {"action": "stop", "name": name, "save": save}
        answers = await _ask(question.about(request, hosts), screen)
        for error in answers.errors.values():
            what, *further_lines = error.lines()
            screen.report_last(f"error: {what}", *further_lines)

        codes = [remote.code for remote in answers.remotes if remote.code is not None]
        if answers.errors or not codes:
            return ExitCode.PREFLIGHT_FAILED

        how = "it had ended before"
        if ExitCode.PREEMPTED in codes:
            how = "it has saved and stopped: launch it again to resume"
        elif ExitCode.INTERRUPTED in codes:
            how = "it was stopped" + (" without a save" if save else "")
        screen.report(f"{name} has ended on {plural(len(codes), 'host')}; {how}")
        return ExitCode.SUCCESS

    return with_screen(stop)


class _Attached(Conversation):
    """Shows what the ranks of a job write, as its launch would."""

    is_detached = False

    def _receive(self, remote: Remote, frame: Mapping[str, Any]) -> None:
        """As a launch shows it, but a failure ends nothing."""
        match frame["kind"]:
            case "started":
                self.diagnoses.print_waiting()
                self._started(frame["world_size"])
            case "diagnosis":
                if self.diagnoses.add(frame, remote.num_starts):
                    self.diagnoses.print_waiting()
            case "ended" if frame["code"]:
                self.ended_first = self.ended_first or remote
            case _:
                super()._receive(remote, frame)

    def _lost(self, remote: Remote) -> None:
        """A host that is not reached is named; the lines of the others are shown."""
        super()._lost(remote)
        if self.is_detached:
            return
        what = self.errors[remote.host].what
        self.warn(
            f"{what}; what its ranks write is not shown, and the job continues without this command"
        )

    def interrupted(self, number: signal.Signals) -> None:
        """Close the connections; the job continues."""
        self.is_detached = True
        self.is_ending = True
        for remote in self.remotes:
            remote.give_up()


def attach_to_job(question: Question, name: str) -> int:
    """Show the job until it ends, or until Ctrl-C; its exit code."""
    hosts, record = with_screen(lambda screen: _hosts_of(question, name, screen))
    if record.is_json:
        os.environ.setdefault(FORMAT, "json")
        wrap_output()
    request = question.about({"action": "follow", "name": name}, hosts)
    job = replace(request, program=record.program, logs=Path(record.logs))

    async def attach(screen: Screen) -> int:
        """Show what comes, then conclude as the launch would have."""
        attached = _Attached(job, screen)
        with handling(SIGNALS, attached.interrupted):
            await attached.run()
            await attached.close()

        if attached.is_detached:
            screen.report(f"detached; {name} continues")
            return ExitCode.SUCCESS
        if not any(remote.code is not None for remote in attached.remotes):
            error = next(iter(attached.errors.values()))
            raise PreflightError(error.what, next_step=error.next_step)
        return conclude(attached)

    return with_screen(attach)


async def _hosts_of(question: Question, name: str, screen: Screen) -> tuple[list[Host], JobRecord]:
    """All hosts of the job, in the order of its nodes: as the user names them, or else as the launch
    did."""
    answers = await _ask(question.about({"action": "list", "name": name}, question.hosts), screen)
    records = [(host, record) for host, of_host in answers.records.items() for record in of_host]
    if records and records[0][1].hosts:
        _, record = records[0]
        named = {peer.node.node_rank: host for host, peer in records}
        ranks = range(len(record.hosts))
        return [named.get(rank) or record.host(rank) for rank in ranks], record

    for error in answers.errors.values():
        raise error
    where = ", ".join(host.address for host in question.hosts)
    raise UsageError(
        f"there is no job {name} on {where}",
        next_step="`drumline jobs --hosts ...` lists the jobs of the hosts",
    )


async def _ask(question: Question, screen: Screen) -> Conversation:
    """The answers, when all hosts have answered or failed."""
    conversation = Conversation(question, screen)
    await conversation.run()
    await conversation.close()
    return conversation

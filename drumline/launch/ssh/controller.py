"""Runs a job on several hosts from one command: starts a supervisor on each, shows what all ranks write, ends all.

A host that fails or is lost ends the job on the others. So does a signal to this process; and should this process be
killed or cut off, each supervisor ends its own part.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from drumline.errors import DrumlineError, ExitCode, PreflightError
from drumline.launch.hosts import Host
from drumline.launch.node.local import INTERRUPTED, STOPPED, exit_code_of
from drumline.launch.node.watch_folder import VERDICT_S
from drumline.launch.ssh.client import ssh_words
from drumline.launch.ssh.errors import not_reached, was_lost
from drumline.launch.ssh.frames import PROTOCOL
from drumline.launch.ssh.remote import Remote
from drumline.launch.ssh.screen import Screen
from drumline.launch.ssh.supervisor import LEASE_S
from drumline.launch.ssh.verdict import Failure, in_order, last_lines
from drumline.launch.torchrun import Node, Program
from drumline.launch.watch_terms import ScriptWatch, new_secret

# After a rank has failed, others that fail with it are heard of before all are ended.
SETTLE_S = 1.0
# How much longer than the grace the end of a job may take, until hosts that do not answer are given up.
ENDING_S = 5.0
# A jump host's sshd turns away at random when many knock at once.
MAX_LOGGING_IN = 10
# What asks a run to save and leave; the others only end it.
LEAVING = (signal.SIGTERM, signal.SIGUSR1)
SIGNALS = (signal.SIGINT, signal.SIGHUP, *LEAVING)
LEFT = "drumline: told to leave by {}; the ranks have saved, and the same command goes on from there"


@dataclass(frozen=True, kw_only=True)
class HostsJob:
    """What runs, and where."""

    job: str
    hosts: Sequence[Host]
    nodes: Sequence[Node]
    program: Program
    client: Sequence[str]
    """The words that call ssh."""
    python: str
    python_path: str | None = None
    cwd: Path
    logs: Path
    task_logs: Path | None = None
    """Where ranks of a task write by themselves."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    grace_s: float
    min_nodes: int | None = None
    """As long as so many hosts are there, the loss of one that is not the first does not end the job; None: all."""
    secret: str = field(default_factory=new_secret, repr=False)
    """Of the sidecars beside the ranks."""
    script_watch: ScriptWatch | None = None


def run_on_hosts(job: HostsJob) -> int:
    """To the end; returns the exit code, when all that can be said has been said."""
    sys.stdout.flush()
    screen = Screen()
    try:
        return asyncio.run(Controller(job, screen).run())
    finally:
        screen.close()


class Controller:
    """The job while it runs."""

    def __init__(self, job: HostsJob, screen: Screen) -> None:
        self.job = job
        self.screen = screen
        self.remotes = [self._remote(host, node) for host, node in zip(job.hosts, job.nodes, strict=True)]
        self.problems: list[DrumlineError] = []
        self.ended_first: Remote | None = None
        """Whose part of the job failed without us."""
        self.left_behind: list[Remote] = []
        """Hosts that are gone, and that the job goes on without."""
        self.logging_in = asyncio.Semaphore(MAX_LOGGING_IN)
        self.told: signal.Signals | None = None
        """The signal that this process was told to end by."""
        self.is_ending = False
        self.num_ranks = 0
        self._ruling_said = ""

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        # Under nohup, a terminal that goes away is none of our business.
        heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        for number in heeded:
            loop.add_signal_handler(number, self._interrupted, number)
        count = len(self.remotes)
        self.screen.say(f"{count} host{'s' if count > 1 else ''}; logs in {self.job.logs} on each")
        await asyncio.gather(*(self._stay_with(remote) for remote in self.remotes))
        for number in heeded:
            loop.remove_signal_handler(number)
        return self._conclude()

    def _remote(self, host: Host, node: Node) -> Remote:
        job = self.job
        given = [f"PYTHONPATH={job.python_path}"] if job.python_path else []
        command = [*given, job.python, "-m", "drumline.launch.ssh.supervisor"]
        spec = {
            "kind": "spec",
            "protocol": PROTOCOL,
            "job": job.job,
            "node": asdict(node),
            "program": asdict(job.program),
            "environment": dict(job.environment),
            "logs": str(job.logs),
            "task_logs": str(job.task_logs) if job.task_logs else None,
            "grace_s": job.grace_s,
            "lease_s": LEASE_S,
            "secret": job.secret,
            "script_watch": asdict(job.script_watch) if job.script_watch else None,
        }
        words = ssh_words(job.client, host, command, cwd=job.cwd)
        return Remote(host, words, spec, self.screen, self._heard)

    async def _stay_with(self, remote: Remote) -> None:
        async with self.logging_in:
            if self.is_ending:  # before its turn came
                remote.ssh_code, remote.was_refused = -1, True
                return
            running = asyncio.create_task(remote.run())
            begun = asyncio.create_task(remote.begun.wait())
            await asyncio.wait({running, begun}, return_when=asyncio.FIRST_COMPLETED)
            begun.cancel()
        try:
            await running
        except OSError as error:
            remote.ssh_code = -1
            what = f"{self.job.client[0]} cannot be started: {error.strerror}"
            self._fail(
                PreflightError(what, next_step="install OpenSSH's client, or say how to call it: --ssh")
            )
        if remote.code is None and not remote.was_refused:
            self._lost(remote)

    def _heard(self, remote: Remote, frame: Mapping[str, Any]) -> None:
        kind = frame["kind"]
        if kind == "hello" and frame["protocol"] != PROTOCOL:
            next_step = "install the same version on all hosts"
            self._fail(PreflightError(f"{remote.name} has another version of drumline", next_step=next_step))
        elif kind == "refused":
            for what, step in frame["problems"]:
                self._fail(PreflightError(f"{remote.name}: {what}", next_step=step))
        elif kind == "started":
            self._started(frame["world_size"])
        elif kind == "ended" and frame["code"] and not self.is_ending:
            self._ended(remote, frame["code"])
        elif kind == "failed" and not frame["restarts_left"]:
            settle_s = SETTLE_S + (VERDICT_S if frame.get("is_watched") else 0)
            asyncio.get_running_loop().call_later(settle_s, self._end, self.job.grace_s)
        elif kind == "ruling" and frame["was_told"]:
            self._ruling_said = frame["sentence"]
        elif kind == "ruling" and not frame["is_last"]:
            asyncio.get_running_loop().call_later(SETTLE_S, self._say_ruling, frame["sentence"])

    def _say_ruling(self, sentence: str) -> None:
        """Before ranks are started again. Every host has heard the same, and one may have said it."""
        if sentence != self._ruling_said:
            self._ruling_said = sentence
            self.screen.say(sentence, is_error=True)

    def _ended(self, remote: Remote, code: int) -> None:
        """Not well. A signal that ended the agent, as when its host is shut down, took that host alone."""
        by_signal = code < 0 or code == ExitCode.INTERRUPTED
        if by_signal and self._goes_on_without(remote, f"the job was ended on {remote.name}"):
            return
        self.ended_first = self.ended_first or remote
        asyncio.get_running_loop().call_later(SETTLE_S, self._end, self.job.grace_s)

    def _started(self, num_ranks: int) -> None:
        here = [remote for remote in self.remaining if remote.is_running and remote.world_size == num_ranks]
        if sum(len(remote.ranks) for remote in here) >= num_ranks != self.num_ranks:
            count = len(here)
            self.screen.say(f"{num_ranks} ranks run on {count} host{'s' if count > 1 else ''}")
            self.num_ranks = num_ranks

    def _lost(self, remote: Remote) -> None:
        """ssh has ended, and the node's job not, as far as we know."""
        code = remote.ssh_code
        if not remote.has_begun:
            if self.is_ending:
                return
            said, job = list(remote.said) or list(remote.greeting), self.job
            error = not_reached(remote.host, code or 0, said, python=job.python, cwd=str(job.cwd))
        else:
            error = was_lost(remote.host, code, list(remote.said))
        if not self._goes_on_without(remote, error.what):
            self._fail(error)

    def _goes_on_without(self, remote: Remote, why: str) -> bool:
        """Whether the others are enough; then that is said."""
        left = [
            other for other in self.remaining if (other.is_running or other.code == 0) and other is not remote
        ]
        if self.job.min_nodes is None or remote is self.remotes[0] or self.is_ending:
            return False
        if len(left) < self.job.min_nodes:
            return False
        self.left_behind.append(remote)
        names = ", ".join(other.name for other in left if other.is_running)
        others = f"the job goes on with {names}" if names else "the others are done"
        self.screen.say(f"WARNING: {why}; {others}", is_error=True)
        return True

    @property
    def remaining(self) -> list[Remote]:
        """All hosts but those that were left behind."""
        return [remote for remote in self.remotes if remote not in self.left_behind]

    def _fail(self, error: DrumlineError) -> None:
        self.problems.append(error)
        self._end(self.job.grace_s)

    def _interrupted(self, number: signal.Signals) -> None:
        if self.told is not None:
            self.screen.say("ending all ranks at once", is_error=True)
            self._end(0)
            return
        self.told = number
        why = f"told to leave by {number.name}" if number in LEAVING else "interrupted"
        self.screen.say(
            f"{why}; ending the ranks (they have {self.job.grace_s:g} s; once more to end them at once)",
            is_error=True,
        )
        self._end(self.job.grace_s)

    def _end(self, grace_s: float) -> None:
        """Ask all that run to end; those that do not answer in time are given up."""
        if self.is_ending and grace_s:
            return
        self.is_ending = True
        for remote in (remote for remote in self.remotes if remote.is_running and remote.code is None):
            remote.end(grace_s)
            asyncio.get_running_loop().call_later(grace_s + ENDING_S, remote.hang_up)

    def _conclude(self) -> int:
        """The last lines, and the exit code."""
        code = self._tell_result()
        if code:
            self.screen.write(f"drumline: logs in {self.job.logs} on each host\n")
        else:
            self.screen.say(f"done; logs in {self.job.logs} on each host")
        return code

    def _tell_result(self) -> int:
        for error in self.problems:
            self.screen.write(f"drumline: error: {error}\n")
        if self._have_left():
            self.screen.write(LEFT.format(self.told.name if self.told else "a signal to a rank") + "\n")
            return ExitCode.PREEMPTED
        if self.told is not None:
            self.screen.write((INTERRUPTED if self.job.program.is_task else STOPPED) + "\n")
            return ExitCode.INTERRUPTED
        failures = in_order([failure for remote in self.remaining for failure in remote.failures])
        if failures and (code := self._pass_on_ruling(failures[0])) is not None:
            return code
        if failures:
            lost_first = bool(self.problems) and self._last_word_of_lost() <= failures[0].at
            lines = last_lines(failures, self.num_ranks, lost_first=lost_first)
            self.screen.write("".join(f"{line}\n" for line in lines))
            if not lost_first:
                return exit_code_of(failures[0].code, is_task=self.job.program.is_task)
        if self.problems:
            return self.problems[0].exit_code
        if self.ended_first is None or self.ended_first.code is None:
            return ExitCode.SUCCESS
        if not failures:
            self.screen.write(self.ended_first.last_words())
        return exit_code_of(self.ended_first.code, is_task=True)

    def _pass_on_ruling(self, first: Failure) -> int | None:
        """What the sidecars said, once for all hosts, where that explains more than the first failure; the code."""
        rulings = [remote.ruling for remote in self.remaining if remote.ruling is not None]
        # A rank's own last words stay last here, a script's too.
        if not rulings or not rulings[0].tells_more(first.code, is_task=True):
            return None
        self.screen.write(f"drumline: {rulings[0].sentence}\n")
        is_task = self.job.program.is_task
        return ExitCode.HANG if rulings[0].is_hang else exit_code_of(first.code, is_task=is_task)

    def _have_left(self) -> bool:
        """Whether all ranks of a task have saved and left, whoever was told to. Ctrl-C asks for no such thing."""
        codes = {remote.code for remote in self.remaining}
        wanted = self.told is None or self.told in LEAVING
        return self.job.program.is_task and wanted and codes == {int(ExitCode.PREEMPTED)}

    def _last_word_of_lost(self) -> float:
        """When the first of the hosts that were lost was heard for the last time: it was lost after that."""
        return min(
            (remote.heard_at for remote in self.remaining if remote.code is None), default=float("inf")
        )

"""Keeps one node of a detached job running: `python -m drumline.launch.detached.keeper FOLDER`,
without torch.

It runs attempt after attempt under a supervisor, as a launch over ssh does from its terminal, but
for this node alone: the nodes find each other. When it is started again, after a reboot, it begins
the next attempt.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any

from drumline.base.errors import ExitCode
from drumline.base.json_output import as_objects
from drumline.base.processes import Termination
from drumline.base.rank_environment import RESTARTED
from drumline.base.text import print_message
from drumline.base.untrusted import open_log
from drumline.launch.detached import units
from drumline.launch.detached.job_folder import (
    ENDED,
    RUNNING,
    WAITING,
    JobFolder,
    is_of_this_machine,
    unreadable,
)
from drumline.launch.keep_going import (
    SPACE_POLL_S,
    has_space,
    needed_bytes,
    next_pause_s,
    waiting_sentence,
)
from drumline.launch.node.guard import job_processes, new_job
from drumline.launch.node.local import exit_code_of
from drumline.launch.ssh.supervisor import (
    PR_SET_CHILD_SUBREAPER,
    SIGNALS,
    TICK_S,
    Supervisor,
    refusals,
)

STOPPED = "stopped by `drumline stop`"
SHUT_DOWN = "this machine is shut down, or the keeper was ended"
# How often a folder is looked for that may be on a network disk that is not mounted yet.
FOLDER_POLL_S = 2.0
# How a keeper is asked to stop; the key: with a save.
STOP_SIGNALS = {False: signal.SIGUSR1, True: signal.SIGUSR2}
# `drumline jobs` holds a job for a moment, to find out whether it has a keeper.
HOLD_S = 5.0


class Attempt:
    """What the supervisor of an attempt is told, and what it reports."""

    def __init__(self, keeper: Keeper) -> None:
        self.out = self
        self.keeper = keeper
        self.agent = 0
        self.is_asked_to_save = False
        self.has_saved = False
        """Whether its ranks have saved because they were asked to stop."""
        self.code: int = ExitCode.TRAINING_FAILED
        self.last_lines: list[str] = []
        """Of the agent, when it failed."""
        self.full_disk = ""
        self.rank_codes: list[int] = []
        """The exit codes of its ranks that failed, since their last start."""
        self.is_final = False
        """Whether a diagnosis says that a restart does not help."""

    @property
    def was_preempted(self) -> bool:
        """As of `Remote`: an agent may be ended while it exits."""
        return self.code == ExitCode.PREEMPTED or set(self.rank_codes) == {ExitCode.PREEMPTED}

    # Orders for the supervisor

    def read(self) -> list[dict[str, Any]]:
        """What `drumline stop` asks for."""
        time.sleep(TICK_S)
        save = self.keeper.stop_request()
        if save is None:
            return []
        if not save or not self.keeper.spec.program.is_task:
            return [{"kind": "end", "grace_s": self.keeper.spec.frame["grace_s"]}]

        if not self.is_asked_to_save:
            self.is_asked_to_save = True
            with suppress(ProcessLookupError):
                # they may take as long as they need
                os.kill(self.agent, signal.SIGUSR1)
        return []

    # What it reports

    def has_room(self) -> bool:
        """True: lines are copied to the JSON log of the node. Otherwise they are only in the files of
        the ranks, which `attach` reads."""
        return self.keeper.spec.is_json

    def flush(self) -> None: ...

    def send(self, kind: str, **content: Any) -> None:
        """Note what decides about another attempt, and keep what `attach` shows."""
        match kind:
            case "lines":
                self.keeper.log_as_json(content["lines"], content["rank"])
                return
            case "signalled":
                return
            case "saved":
                self.has_saved = True
                return
            case "progress":
                self.keeper.update(
                    reached_step=content["reached_step"], counted_step=content["counted_step"]
                )
                return
            case "ended":
                self.last_lines = content["last_lines"]
                self.code = content["code"]
                return
            case "started":
                self.rank_codes = []
                self.full_disk = ""
                self.is_final = False
                self.keeper.update(
                    state=RUNNING,
                    why="",
                    first_start=content["start"] + 1,
                    restarts_left=content["restarts_left"],
                )
            case "failed":
                self.rank_codes.append(content["code"])
                self.full_disk = self.full_disk or content["full_disk"]
                self.keeper.update(restarts_left=content["restarts_left"])
            case "diagnosis":
                self.is_final = content["action"] == "stop"
        self.keeper.folder.note(kind, **content)


class Keeper:
    """Runs one node of a job to its end."""

    def __init__(self, folder: JobFolder) -> None:
        self.folder = folder
        self.spec = folder.spec()
        self.state = folder.state()
        self.unrecorded = ""
        """Why the state is not on disk."""
        self.has_saved = False
        """Whether the last attempt has saved when it was asked to stop."""
        self._signalled_stop: bool | None = None

    def run(self) -> int:
        """The exit code of this process: 0 when the job has ended, 1 when it is to go on at the
        next start of this machine."""
        for number in STOP_SIGNALS.values():
            signal.signal(number, self._stop_by_signal)
        why = ""
        if self.state.state == RUNNING:
            why = self._counted("its keeper or this machine was restarted")
        pause_s = 0.0
        while self.state.state != ENDED:
            if why:
                self._say(f"warning: {why}")
            if not self._can_begin(pause_s):
                break

            begun_at = time.monotonic()
            attempt, supervisor = self._run_attempt()
            if supervisor.end_reason and attempt.code:
                # A script starts from the beginning: the next start counts as a restart.
                state = WAITING if self.spec.program.is_task else RUNNING
                self.update(state=state, why=SHUT_DOWN)
                return 1
            pause_s = next_pause_s(pause_s, time.monotonic() - begun_at)
            why = self._why_again(attempt, supervisor)

        units.remove(self.folder)
        return 0

    def update(self, **changes: Any) -> None:
        """Record a change of the state. The job continues where that is not possible."""
        new = replace(self.state, **changes)
        if new == self.state and not self.unrecorded:
            return
        self.state = new
        self.unrecorded = ""
        try:
            self.folder.write_state(new)
        except OSError as error:
            self.unrecorded = f"the state of the job could not be recorded: {error}"

    def end(self, code: int, why: str = "", **frame: Any) -> None:
        """The job has ended on this node."""
        self.update(state=ENDED, code=code, why=why)
        self.folder.note("ended", **{"last_lines": [], "end_reason": why, **frame, "code": code})
        with suppress(OSError):
            self.folder.forget_secrets()
        if self.unrecorded:
            print_message(self.unrecorded)

    def stop_request(self) -> bool | None:
        """Whether the job is to save; None: it is not asked to stop. A reboot does not change it."""
        if self._signalled_stop is not None:
            self.update(stops_with_save=self._signalled_stop)
        return self.state.stops_with_save

    def _stop_by_signal(self, number: int, _: FrameType | None) -> None:
        """The handler only notes it: the main thread acts on it within a tick."""
        self._signalled_stop = number == STOP_SIGNALS[True]

    def _say(self, text: str) -> None:
        """For those who attach, and for the JSON log."""
        self.folder.note("notice", text=text)
        self.log_as_json([text], None)

    def log_as_json(self, lines: Sequence[str], rank: int | None) -> None:
        """Where that was asked for, all lines of this node are in one more file, as objects."""
        if not self.spec.is_json:
            return
        rank_field = {} if rank is None else {"rank": rank}
        fields = {"host": self.spec.machine, **rank_field}
        file_name = f"node-{self.spec.node.node_rank}.jsonl"
        path = Path(self.spec.cwd, self.spec.frame["logs"], file_name)
        with suppress(OSError), open_log(path) as log:
            log.writelines(f"{line}\n" for line in as_objects(lines, fields, is_authority=True))

    # An attempt

    def _can_begin(self, pause_s: float) -> bool:
        """Wait for the folder of the job, and for the end of a pause; False: the job was stopped."""
        until = time.monotonic() + self.spec.node.join_timeout_s
        resume_at = time.monotonic() + pause_s
        while self.stop_request() is None:
            problem = self._wrong_folder()
            if not problem and time.monotonic() >= resume_at:
                return True
            if problem and time.monotonic() > until:
                self.end(ExitCode.PREFLIGHT_FAILED, problem)
                return False
            self.update(state=WAITING, why=problem or self.state.why)
            time.sleep(FOLDER_POLL_S if problem else TICK_S)

        self.end(self._code_of_stop(), STOPPED)
        return False

    def _code_of_stop(self) -> int:
        """75 only if a checkpoint was saved because of the request."""
        has_saved = self.stop_request() and self.has_saved
        return ExitCode.PREEMPTED if has_saved else ExitCode.INTERRUPTED

    def _wrong_folder(self) -> str:
        """Why nothing can run there; empty: it can."""
        try:
            os.chdir(self.spec.cwd)
        except OSError as error:
            return f"the folder {self.spec.cwd} cannot be used: {error.strerror}"
        return next((what for what, _ in refusals(self.spec.frame)), "")

    def _run_attempt(self) -> tuple[Attempt, Supervisor]:
        """Run the ranks of this node once, with what is left of the restarts."""
        earlier = self.state.attempt
        if earlier:
            # No two attempts of a node may write to one run folder.
            Termination(lambda: job_processes(earlier), 0).wait()

        job = new_job()
        max_restarts = self.spec.node.max_restarts
        restarts_left = self.state.restarts_left
        node = replace(
            self.spec.node,
            restarts_used=0 if restarts_left is None else max_restarts - restarts_left,
            reached_step=self.state.reached_step,
            may_be_rebooting=bool(earlier),
        )
        restarted = {RESTARTED: "1"} if earlier else {}
        frame = {
            **self.spec.frame,
            "job": job,
            "first_start": self.state.first_start,
            "environment": {**self.spec.frame["environment"], **restarted},
            "node": asdict(node),
        }
        self.update(state=RUNNING, why="", attempt=job, counted_step=self.state.reached_step)
        attempt = Attempt(self)
        supervisor = Supervisor(frame, attempt)
        attempt.agent = supervisor.agent.process.pid
        supervisor.agent.send(asdict(node))
        supervisor.run()
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        return attempt, supervisor

    # After an attempt

    def _why_again(self, attempt: Attempt, supervisor: Supervisor) -> str:
        """Why there is another attempt; empty: the job has ended here."""
        code = attempt.code
        self.has_saved = attempt.has_saved
        if self.stop_request() is not None:
            self.end(code and self._code_of_stop(), STOPPED)
            return ""

        may_resume = self.spec.keep_going and self.spec.program.is_task
        if may_resume and attempt.was_preempted:
            return "preempted by a signal or a notice to a rank, and saved; resuming"
        if may_resume and attempt.full_disk:
            return self._await_space(attempt.full_disk)

        # An agent that was ended while it exits: its ranks have failed for good.
        is_over = bool(attempt.rank_codes) and self.state.restarts_left == 0
        if code < 0 and is_over:
            code = attempt.rank_codes[0]
        if code and not attempt.is_final and not is_over:
            if supervisor.lost_first_node:
                return self._counted("the first node is lost")
            if code < 0 or code == ExitCode.INTERRUPTED:
                return self._counted("the agent of this node was ended by a signal")

        if attempt.was_preempted:
            code = ExitCode.PREEMPTED
        self.end(
            code and exit_code_of(code, is_task=self.spec.program.is_task),
            last_lines=attempt.last_lines,
        )
        return ""

    def _counted(self, what: str) -> str:
        """Why there is another attempt, which counts as a restart; empty: none is left."""
        state = self.state
        max_restarts = self.spec.node.max_restarts
        left = max_restarts if state.restarts_left is None else state.restarts_left
        if state.reached_step > state.counted_step:
            left = max_restarts
        if left == 0:
            self.end(ExitCode.TRAINING_FAILED, f"{what}, and no restart is left")
            return ""

        self.update(restarts_left=left - 1)
        return f"{what}; restarting (restart {max_restarts - left + 1} of {max_restarts})"

    def _await_space(self, folder: str) -> str:
        """Until the disk has space again."""
        sentence = waiting_sentence(folder, host=self.spec.machine)
        self.update(state=WAITING, why=f"the disk of {folder} is full")
        self._say(sentence)
        size = needed_bytes(self.spec.program.run)
        while self.stop_request() is None and not has_space(folder, size):
            time.sleep(SPACE_POLL_S)
        return "there is space again; resuming"


def main(path: str) -> int:
    """Hold the job, which only one process can, and keep it running."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    folder = JobFolder(Path(path))
    if folder.path.parents[1].is_dir() and not folder.path.exists():
        units.remove(folder)  # the job was deleted; or else its disk is not mounted yet
        return 0
    if not is_of_this_machine(folder.spec()):
        return 0  # its unit is in a home folder that several hosts share

    until = time.monotonic() + HOLD_S
    while time.monotonic() < until:
        with folder.held() as is_ours:
            if is_ours:
                try:
                    keeper = Keeper(folder)
                except ValueError as error:  # the system would start it again and again
                    print_message(unreadable(folder.path, error))
                    return 0
                os.environ.update(keeper.spec.variables)
                return keeper.run()
        time.sleep(TICK_S)
    return 1  # the system tries again: another keeper has it, or a lock that is no longer held


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

"""A `drumline launch` command line, and what each of its launchers derives from it."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from drumline.base.errors import ExitCode, UsageError
from drumline.base.job_secret import secret_from
from drumline.base.rank_environment import DEFAULT_ON_HANG, LOST_AFTER_S, RESTARTED, ScriptWatch
from drumline.base.text import print_message
from drumline.cli import train_command
from drumline.config import FlagValues, read_flags
from drumline.launch.keep_going import needed_bytes, next_pause_s, wait_for_space
from drumline.launch.node.guard import DEFAULT_GRACE_S, new_job
from drumline.launch.node_plan import (
    SCRIPT_RESTARTS,
    TASK_RESTARTS,
    NodePlan,
    Program,
    Supervision,
    task_program,
)
from drumline.runs.run_folder import run_name


def is_script(target: str) -> bool:
    """`train.py` is a script; `digits` and `tasks.py:MyTask` are tasks."""
    return target.endswith(".py")


@dataclass
class NodeOutcome:
    """How the ranks of this machine ended, as their agent reported it."""

    was_signalled: bool = False
    """Whether a signal to the launch itself ended them."""
    full_disk: str = ""
    """The folder whose disk is full, if that ended them."""

    def note(self, kind: str, **content: Any) -> None:
        """What the agent reports."""
        if kind == "signalled":
            self.was_signalled = True
        elif kind == "started":
            self.full_disk = ""
        elif kind == "failed":
            self.full_disk = self.full_disk or content["full_disk"]


@dataclass(frozen=True)
class LaunchRequest:
    """The flags of the launch, the task or script, and the arguments that belong to that."""

    flags: FlagValues
    target: str
    arguments: Sequence[str]
    follow: Sequence[str] = ()
    """The words of the command that shows or stops a detached job; none: of `drumline` itself."""

    @property
    def name(self) -> str:
        """For a cluster: `examples/own_loop.py` becomes `own-loop`, `tasks.py:MyTask` becomes
        `mytask`."""
        base = Path(self.target).stem if is_script(self.target) else run_name(self.target)
        return re.sub(r"[^a-z0-9]+", "-", base.lower()).strip("-")

    def program(self, *defaults: tuple[str, str | None]) -> Program:
        """What the ranks run; the settings of a task are checked here, once, and not by each
        rank."""
        if is_script(self.target):
            words = (self.target, *self.arguments)
            is_watched = bool(self.flags.watch)
            return Program(words, is_watched=is_watched, profile=self.profile)

        lost_after = self.flags.lost_after
        lost_s = ("--watch.lost_s", None if lost_after is None else str(lost_after))
        program = task_program(self.target, self.arguments, *defaults, lost_s)
        flags = read_flags(program.words[1:], train_command.OWN_FLAGS, max_positional=1)

        for name in ("procs", "max-restarts"):
            if name in flags.values:
                raise UsageError(
                    f"--{name} is a flag of the launch, but is given after the task's name",
                    next_step=f"drumline launch --{name} N {self.target}",
                )

        _, layers = train_command.settle_before_torch(flags)
        continues = train_command.value_of(layers, "dist.on_lost_node") == "continue"
        run = train_command.run_folder(flags, self.target)
        return replace(program, run=str(run), continues=continues)

    @property
    def follow_words(self) -> list[str]:
        """With `{verb}`, `{job}` and `{hosts}`; on its hosts it is reached as here."""
        if self.follow:
            return list(self.follow)
        hosts = ["--hosts", "{hosts}"]
        if "hostfile" in self.flags:
            hosts = ["--hostfile", str(Path(self.flags.hostfile).absolute())]
        names = [name for name in ("ssh", "python") if name in self.flags]
        options = [word for name in names for word in (f"--{name}", str(self.flags[name]))]
        return ["drumline", "{verb}", "{job}", *hosts, *options]

    @cached_property
    def profile(self) -> tuple[str, ...]:
        """Which steps of a script are profiled, where, and how it continues; empty: none."""
        if "profile" not in self.flags:
            return ()
        folder = self.flags.profile_to or Path(
            "runs", "profile", f"{self.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        )
        return (
            self.flags.profile,
            str(Path(folder).absolute()),
            "only" if self.flags.profile_only else "all",
        )

    def restarts(self, min_nodes: int | None) -> int:
        """A task resumes from its newest checkpoint. A script may not: it would train from the start
        each time, and overwrite its files. A user who lets a job continue with fewer nodes states
        that the script resumes."""
        resumes = min_nodes is not None or not is_script(self.target)
        default = TASK_RESTARTS if resumes else SCRIPT_RESTARTS
        return int(self.flags.get("max-restarts", default))

    def completed(self, node: NodePlan, min_nodes: int | None) -> NodePlan:
        """The node, with the restarts and timeouts that were given."""
        fields = {
            "join-timeout": "join_timeout_s",
            "last-call": "last_call_s",
            "lost-after": "lost_after_s",
        }
        timeouts = {field: self.flags[name] for name, field in fields.items() if name in self.flags}
        return replace(node, min_nodes=min_nodes, max_restarts=self.restarts(min_nodes), **timeouts)

    def script_watch(self, folder: Path) -> ScriptWatch | None:
        """The options of the watchdog over a script, whose diagnoses go to this folder; None: it is
        off."""
        if not self.flags.watch:
            return None
        if "prometheus" in self.flags:
            train_command.check_metrics_extra("--prometheus")
        return ScriptWatch(
            run=str(folder.absolute()),
            on_hang=self.flags.get("on-hang", DEFAULT_ON_HANG),
            hang_s=self.flags.hang_after,
            lost_s=float(self.flags.get("lost-after", LOST_AFTER_S)),
            prometheus=self.flags.get("prometheus", ""),
        )

    def run_node(self, node: NodePlan, program: Program) -> int:
        """Start the ranks of a node on this machine and wait for them."""
        from drumline.launch.node.local import exit_between_starts

        if node.num_nodes > 1:
            print_message(
                f"node {node.node_rank} of {node.num_nodes} joins at {node.endpoint}",
                stream=sys.stdout,
            )
        code, outcome = self._run_once(node, program)
        pause_s = 0.0
        while self.flags.keep_going and not outcome.was_signalled:
            exit_between_starts()
            if outcome.full_disk:
                wait_for_space(outcome.full_disk, needed_bytes(program.run))
            elif code == ExitCode.PREEMPTED:
                print_message(
                    "warning: preempted by a signal or a notice to a rank, and saved; resuming"
                )
                time.sleep(pause_s)
            else:
                break
            os.environ[RESTARTED] = "1"
            begun_at = time.monotonic()
            code, outcome = self._run_once(node, program)
            pause_s = next_pause_s(pause_s, time.monotonic() - begun_at)
        return code

    def _run_once(self, node: NodePlan, program: Program) -> tuple[int, NodeOutcome]:
        """One start of the agent, and how it ended."""
        from drumline.launch.node.local import run_node

        job = new_job()
        outcome = NodeOutcome()
        supervision = Supervision(
            job=job,
            secret=secret_from(os.environ),
            grace_s=self.flags.get("grace", DEFAULT_GRACE_S),
            script_watch=self.script_watch(launch_folder(job)),
            report=outcome.note,
        )
        return run_node(node, program, supervision), outcome


def launch_folder(job: str) -> Path:
    """Where a launch writes what has no run folder."""
    return Path("runs", "launch", f"{time.strftime('%Y%m%d-%H%M%S')}-{job[:6]}")

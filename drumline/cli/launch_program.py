"""What the ranks of `drumline launch` run: a script as it is, or a task, whose settings are checked first."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from drumline.cli import train_command
from drumline.config import Flags, read_flags
from drumline.errors import UsageError
from drumline.launch.node.guard import GRACE_S, new_job
from drumline.launch.node.supervision import Supervision
from drumline.launch.node_plan import NodePlan, Program, default_restarts, task_program
from drumline.launch.rank_environment import DEFAULT_ON_HANG, ScriptWatch


def is_script(target: str) -> bool:
    """`train_command.py` is a script; `digits` and `tasks.py:MyTask` are tasks."""
    return target.endswith(".py")


def program_of(target: str, arguments: Sequence[str], *defaults: tuple[str, str | None]) -> Program:
    """What the ranks run; a task's settings are checked here, once, and not by each rank."""
    if is_script(target):
        return Program((target, *arguments))
    program = task_program(target, arguments, *defaults)
    flags = read_flags(program.words[1:], train_command.OWN_FLAGS, max_positional=1)
    for name in ("procs", "max-restarts"):
        if name in flags.own:
            raise UsageError(
                f"--{name} stands behind the task's name", next_step=f"drumline launch --{name} N {target}"
            )
    train_command.settle_before_torch(target, flags)
    return replace(program, run=str(train_command.run_folder(flags, target)))


def watched(program: Program, flags: Flags) -> Program:
    """The script under the watch, if that is wanted."""
    return replace(program, is_watched=True) if flags.own.get("watch") else program


def script_watch(flags: Flags, folder: Path) -> ScriptWatch | None:
    """What the flags want of the watch over a script, whose diagnoses go to this folder; None: nothing."""
    given = flags.own
    if not given.get("watch"):
        return None
    return ScriptWatch(
        run=str(folder.absolute()),
        on_hang=given.get("on-hang", DEFAULT_ON_HANG),
        hang_s=given.get("hang-after"),
    )


def supervision_of(flags: Flags, secret: str | None) -> Supervision:
    """The terms of a node that is started on this machine. `secret`: what all nodes were given."""
    job = new_job()
    return Supervision(
        job=job,
        secret=secret,
        grace_s=flags.own.get("grace", GRACE_S),
        script_watch=script_watch(flags, launch_folder(job)),
    )


def launch_folder(job: str) -> Path:
    """Where a launch keeps what it has no run folder for."""
    return Path("runs", "launch", f"{time.strftime('%Y%m%d-%H%M%S')}-{job[:6]}")


def restarts_of(flags: Flags, target: str, min_nodes: int | None = None) -> int:
    """How often failed ranks are started again."""
    default = default_restarts(is_task=not is_script(target), may_shrink=min_nodes is not None)
    given: int = flags.own.get("max-restarts", default)
    return given


def with_waits(node: NodePlan, flags: Flags) -> NodePlan:
    """The node, with how long it waits for others as far as the user said so."""
    fields = {"join-timeout": "join_timeout_s", "last-call": "last_call_s", "lost-after": "lost_after_s"}
    return replace(node, **{field: flags.own[name] for name, field in fields.items() if name in flags.own})

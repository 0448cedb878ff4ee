"""What the ranks of `drumline launch` run: a script as it is, or a task, whose settings are checked first."""

from __future__ import annotations

from collections.abc import Sequence

from drumline.cli import train
from drumline.config import Flags, read_flags
from drumline.errors import UsageError
from drumline.launch.plan import default_restarts, task_program
from drumline.launch.torchrun import Program


def is_script(target: str) -> bool:
    """`train.py` is a script; `digits` and `tasks.py:MyTask` are tasks."""
    return target.endswith(".py")


def program_of(target: str, arguments: Sequence[str], *defaults: tuple[str, str | None]) -> Program:
    """What the ranks run; a task's settings are checked here, once, and not by each rank."""
    if is_script(target):
        return Program((target, *arguments))
    program = task_program(target, arguments, *defaults)
    own = {name: kind for name, (kind, *_) in train.OWN_FLAGS.items()}
    flags = read_flags(program.words[1:], own=own, max_words=1)
    if "procs" in flags.own:
        raise UsageError(
            "--procs stands behind the task's name", next_step=f"drumline launch --procs N {target}"
        )
    train.settle_before_torch(target, flags)
    return program


def restarts_of(flags: Flags, target: str) -> int:
    """How often failed ranks are started again."""
    given: int = flags.own.get("max-restarts", default_restarts(is_task=not is_script(target)))
    return given

"""How a job on several hosts ended: the last lines on the screen, and the exit code."""

from __future__ import annotations

from drumline.errors import ExitCode
from drumline.launch.interrupts import interrupted
from drumline.launch.node.local import STOPPED, exit_code_of
from drumline.launch.ssh.controller import LEAVING, Controller
from drumline.launch.ssh.verdict import Failure, in_order, last_messages

LEFT = "preempted by {}; the ranks have saved: rerun the same command to resume"


def conclude(controller: Controller) -> int:
    """The last lines, and the exit code."""
    code = _tell_result(controller)
    if code:
        controller.screen.conclude(f"logs in {controller.job.logs} on each host")
    else:
        controller.screen.say(f"done; logs in {controller.job.logs} on each host")
    return code


def _tell_result(controller: Controller) -> int:
    for error in controller.problems:
        what, *more = error.lines()
        controller.screen.conclude(f"error: {what}", *more)
    if _have_left(controller):
        by = controller.told.name if controller.told else "a signal to a rank"
        controller.screen.conclude(LEFT.format(by))
        return ExitCode.PREEMPTED
    if controller.told is not None:
        words = controller.job.program.words
        controller.screen.conclude(interrupted(None, words) if controller.job.program.is_task else STOPPED)
        return ExitCode.INTERRUPTED
    failures = in_order(
        [remote.marked(failure) for remote in controller.remaining for failure in remote.failures]
    )
    if failures and (code := _report_diagnosis(controller, failures[0])) is not None:
        return code
    if failures:
        lost_first = bool(controller.problems) and _last_word_of_lost(controller) <= failures[0].at
        for lines in last_messages(failures, controller.num_ranks, lost_first=lost_first):
            controller.screen.conclude(*lines)
        if not lost_first:
            return exit_code_of(failures[0].code, is_task=controller.job.program.is_task)
    if controller.problems:
        return controller.problems[0].exit_code
    if controller.ended_first is None or controller.ended_first.code is None:
        return ExitCode.SUCCESS
    if not failures:
        controller.screen.conclude(*controller.ended_first.last_words())
    return exit_code_of(controller.ended_first.code, is_task=True)


def _report_diagnosis(controller: Controller, first: Failure) -> int | None:
    """What the sidecars said, once for all hosts, where that explains more than the first failure; the code."""
    found = [remote.diagnosis for remote in controller.remaining if remote.diagnosis is not None]
    # A rank's own last words stay last here, a script's too.
    if not found or not found[0].explains_more(first.code, is_task=True):
        return None
    controller.screen.conclude(found[0].sentence)
    is_task = controller.job.program.is_task
    return ExitCode.HANG if found[0].is_hang else exit_code_of(first.code, is_task=is_task)


def _have_left(controller: Controller) -> bool:
    """Whether all ranks of a task have saved and left, whoever was told to. Ctrl-C asks for no such thing."""
    codes = {remote.code for remote in controller.remaining}
    wanted = controller.told is None or controller.told in LEAVING
    return controller.job.program.is_task and wanted and codes == {int(ExitCode.PREEMPTED)}


def _last_word_of_lost(controller: Controller) -> float:
    """When the first of the hosts that were lost was heard for the last time: it was lost after that."""
    return min(
        (remote.connection.heard_at for remote in controller.remaining if remote.code is None),
        default=float("inf"),
    )

"""The command `drumline`: finds the verb, and imports only what that verb needs."""

from __future__ import annotations

import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence

from drumline.base.errors import (
    DrumlineError,
    ExitCode,
    Place,
    did_you_mean,
    report_uncaught_errors,
)
from drumline.base.text import print_message, show

VERBS = {
    "train": "train a task: alone, on several ranks, or as a rank of a job",
    "launch": "start a task or a torchrun script: here, on hosts over ssh,\n"
    "by hand on several machines, on Slurm, on Kubernetes",
    "find-lr": "suggest a learning rate, from steps at growing rates",
    "find-batch": "find the largest micro-batch that fits in the GPU's memory",
    "plan": "predict the memory of a rank, and the cheapest mode (ddp, zero1,\nfsdp, hsdp) that fits on each GPU",
    "evaluate": "evaluate a checkpoint of a run, on any number of ranks",
    "predict": "write what a checkpoint predicts for every sample of a dataset",
    "export": "write a checkpoint's weights to a safetensors file",
    "profile": "find out where the time of a step goes, rank by rank, and what\nto change",
    "watch": "follow a running job from another terminal, rank by rank",
    "jobs": "list the detached jobs of hosts: state, step, run folder",
    "attach": "show the lines of a detached job; Ctrl-C detaches again",
    "stop": "end a detached job on all its hosts, with or without a save",
    "runs": "list run folders: state, step, result, size",
    "report": "write runs as one HTML page: curves, faults, slow ranks; or\nserve it while a run is training",
    "doctor": "check this machine, or hosts and every pair, before a run",
    "tune": "print the NCCL and gloo variables that these hosts need, with\nthe reason of each; read NCCL's debug logs",
    "scale": "predict a job on more nodes, measure its scaling, compare both",
    "aws": "a cluster on AWS: its price, make it, launch on it, remove it",
    "lint": "find mistakes of distributed training in any code",
    "verify": "check run folders: checkpoints, each sample once, events",
    "prove-resume": "kill a job with -9, resume it, and compare every bit with\na run that was not killed",
}
HELP = """\
usage: drumline VERB ...

Takes a PyTorch training job from one process to many nodes, and reports which
rank fails, hangs or is slow, and why.

{verbs}

  drumline VERB --help   what a verb does, with all its flags
  drumline --version     the version

exit codes: 0 success, 1 training failed (verify, watch, lint, tune: problems
            were found), 2 wrong usage or configuration (lint: or a file that
            could not be read), 3 stopped before the first step (doctor, tune:
            something must be fixed), 70 hang, 75 preempted, and saved,
            130 interrupted
"""
UNEXPECTED = "report it as a bug, with the lines above, unless they name something that you can fix"


class HelpShown(Exception):  # noqa: N818  # no error
    """The help of a verb is shown: the command has nothing else to do."""

    def __init__(self, *, is_asked_for: bool = True) -> None:
        self.exit_code = ExitCode.SUCCESS if is_asked_for else ExitCode.USAGE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    for stream in (sys.stdout, sys.stderr):
        # The user's own output too: a letter that an ASCII terminal or pipe cannot have must not end a job.
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")

    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except HelpShown as shown:
        return shown.exit_code
    except DrumlineError as error:
        what, *details = error.lines()
        print_message(f"error: {what}", *details)
        _hand_over(error.what, error.next_step, error.place)
        return error.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        frames = traceback.format_exc().splitlines()
        print_message(f"error: {what}", *frames, f"try: {UNEXPECTED}")
        _hand_over(what, UNEXPECTED, Place(), "\n".join(frames))
        return ExitCode.TRAINING_FAILED


def _hand_over(what: str, next_step: str | None, place: Place, details: str = "") -> None:
    """The error, to the Python program that has started this command, if one has."""
    from drumline.base.rank_environment import ErrorRecord, write_error

    write_error(os.environ, ErrorRecord(what, next_step, place, details))


def _dispatch(arguments: list[str]) -> int:
    """Show the overview, or run the verb."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        verbs = "\n".join(
            f"  {name:<13} {summary}".replace("\n", f"\n{'':<16}")
            for name, summary in VERBS.items()
        )
        show(HELP.format(verbs=verbs), end="")
        return ExitCode.SUCCESS if arguments else ExitCode.USAGE
    verb, *verb_arguments = arguments
    if verb == "--version":
        from importlib.metadata import version

        show(f"drumline {version('drumline')}")
        return ExitCode.SUCCESS
    if verb not in VERBS:
        print_message(f"error: there is no verb {verb!r}; {did_you_mean(verb, VERBS)}")
        return ExitCode.USAGE
    report_uncaught_errors()
    command = importlib.import_module(f"drumline.cli.{verb.replace('-', '_')}_command")
    return int(command.run(verb_arguments))

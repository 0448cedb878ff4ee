"""`drumline prove-resume TASK`: checks the options, runs the proof (tools/prove/prove.py), and
prints the result."""

from __future__ import annotations

import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from drumline.base.errors import ConfigError, DrumlineError, ExitCode, UsageError
from drumline.base.startup import loading
from drumline.base.text import print_message, show_lines
from drumline.base.untrusted import make_own_folder
from drumline.base.user_code import is_class_spec
from drumline.cli import train_command
from drumline.cli.command_line import HELP_FLAG, check_command, check_no_rank, read_command
from drumline.config import PRESETS, Flags, FlagTable, read_layers
from drumline.config.schema import Count, Seed
from drumline.tools.prove.proof_plan import (
    ProofOptions,
    ProofSettings,
    wrong_options,
    wrong_settings,
)
from drumline.tools.prove.prove import Proof

DEFAULT_STEPS = 8
OWN_FLAGS: FlagTable = {
    "world": (
        tuple[Count, ...],
        "N[,N...]",
        "Ranks of each leg [1; with --modes 2]. 4,2,3 starts on 4 ranks, is killed, resumes on 2, is killed, and ends "
        "on 3; one number is one kill. The run without kills has the first number. Different numbers turn on "
        "--train.exact elastic.",
    ),
    "modes": (
        tuple[str, ...],
        "MODE,MODE[,...]",
        "--dist.mode of each leg: ddp, zero1, fsdp or hsdp. What one mode has saved, the next must restore bit for "
        "bit; its own steps have the same samples, and bits that differ by the order of sums.",
    ),
    "steps": (Count, "N", f"Optimizer steps of the complete run [{DEFAULT_STEPS}]."),
    "kill-at": (
        tuple[Count, ...],
        "STEP[,STEP...]",
        "No kill before this step, one for each kill [random].",
    ),
    "kill-in": (
        Literal["step", "save", "evaluation", "any"],
        "step | save | evaluation | any",
        "What the job does when it is killed [any: random].",
    ),
    "kill-rank": (str, "RANK | all", "Which rank is killed [random]."),
    "seed": (Seed, "N", "The seed of the random kills [random, and printed]."),
    "keep": (
        str,
        "DIR",
        "Keep the run folders here [a temporary folder, kept if the proof fails].",
    ),
    **train_command.CONFIG_FLAG,
    **HELP_FLAG,
}
USAGE = """\
usage: drumline prove-resume TASK [--world N[,N...]] [--steps N] [--section.name value ...]

Trains TASK for a few steps without a kill; then again, killed with -9 and resumed; and compares every
sample, weight, optimizer state and evaluation, bit by bit. The settings are those of `drumline train TASK`.
"""
EXIT_CODES = """\
exit codes: 0 proved, 1 not proved, or a run failed, 2 wrong usage, 3 a run was stopped before its first step
            (ranks that differ, data that is missing), 130 interrupted
"""


def run(argv: Sequence[str]) -> int:
    """Run the proof in its folder; the exit code says whether it holds."""
    flags = read_command(
        "prove-resume", argv, {"": OWN_FLAGS}, USAGE, ends_with=EXIT_CODES, takes_settings=True
    )
    check_no_rank("prove-resume")
    options, arguments, changes = _settle(flags)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            # As an exception, so that the runs are ended too.
            signal.signal(number, lambda number, _: sys.exit(128 + number))

    keep = flags.values.keep
    with _folder(keep) as folder:
        print_line(f"kills are drawn from --seed {options.seed}")
        if changes:
            print_line(f"changed for the proof: {changes}")
        if options.is_elastic:
            legs = ", ".join(map(str, options.worlds))
            print_line(
                f"the legs have different numbers of ranks ({legs}): --train.exact elastic is on"
            )
        is_proved = Proof(options, arguments, folder, print_line).run()
        if is_proved and keep is None:
            # A sidecar of the last leg may still write its last status.
            shutil.rmtree(folder, ignore_errors=True)
        else:
            print_line(f"  folder: {folder}")

    return ExitCode.SUCCESS if is_proved else ExitCode.TRAINING_FAILED


def print_line(line: str) -> None:
    show_lines([line])


def _settle(flags: Flags) -> tuple[ProofOptions, list[str], str]:
    """The options, the arguments of `drumline train`, and what is changed in them. All mistakes are
    reported at once, before torch is imported; those that depend on the user's own task, whose file
    imports it, come last."""
    file = flags.values.config
    layers = read_layers(flags, config_file=file, environment={})
    verb_flags = flags.values
    seed = flags.values.seed
    modes = verb_flags.modes or ()
    moment = verb_flags.kill_in
    world = verb_flags.world or ((2,) if modes else (1,))
    options = ProofOptions(
        # One number means one kill, with as many ranks after it, or as many legs as modes.
        worlds=world * max(2, len(modes)) if len(world) == 1 else world,
        modes=modes,
        steps=verb_flags.get("steps", DEFAULT_STEPS),
        seed=random.SystemRandom().randrange(10**6) if seed is None else seed,
        kill_steps=verb_flags.kill_at,
        moment=None if moment == "any" else moment,
        rank=verb_flags.kill_rank,
    )
    problems: list[str] = []

    try:
        train_command.settle_before_torch(flags)
    except ConfigError as error:
        problems += error.problems

    if not flags.layer.broken & {"world", "steps"}:
        problems += wrong_options(options)

    check_command("prove-resume", [*problems, *wrong_settings(layers, options)])
    (task,) = flags.positional  # else there was a problem
    settings = ProofSettings(layers, _task_defaults(task), options)
    check_command("prove-resume", settings.problems())
    arguments = settings.arguments(task, config_file=file)
    return options, arguments, settings.describe_changes()


def _task_defaults(task: str) -> Mapping[str, Any]:
    """A task of the user's own is loaded for them, as each rank does it."""
    if not is_class_spec(task):
        return PRESETS[task].defaults
    with loading():
        from drumline.training.tasks.built_in import load_task

    try:
        return load_task(task).defaults
    except DrumlineError:
        raise
    except Exception as error:
        raise UsageError(
            f"{task} cannot be loaded: {type(error).__name__}: {error}",
            next_step=f"make `drumline train {task}` start first",
        ) from error


@contextmanager
def _folder(keep: str | None) -> Iterator[Path]:
    """The folder of the runs. A temporary one is removed after a usage error or an interrupt."""
    folder = (
        Path(tempfile.mkdtemp(prefix="drumline-prove-"))
        if keep is None
        else _new_folder(Path(keep))
    )
    try:
        yield folder
    except (UsageError, KeyboardInterrupt, SystemExit) as error:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
        if not isinstance(error, UsageError):
            left = "its folder was removed" if keep is None else f"its folder is kept: {folder}"
            with suppress(OSError):  # the terminal may be closed
                print_message(f"interrupted; {left}")
        raise


def _new_folder(folder: Path) -> Path:
    """Of --keep: it may exist, if it is empty."""
    try:
        make_own_folder(folder, follow_links=True)
        is_empty = not any(folder.iterdir())
    except OSError as error:
        raise UsageError(
            f"the folder {folder} cannot be made or written: {error.strerror}",
            next_step="choose another with --keep DIR",
        ) from error

    if not is_empty:
        raise UsageError(
            f"the folder {folder} is not empty",
            next_step="choose another with --keep DIR, or empty it",
        )
    return folder

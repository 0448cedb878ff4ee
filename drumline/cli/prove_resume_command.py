"""`drumline prove-resume TASK`: reads the options, lets `prove` do the work, and prints the verdict."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NoReturn

from drumline import terminal
from drumline.audit.kill_schedule import ProofOptions, worlds_of, wrong_options
from drumline.audit.proof_settings import ProofSettings, wrong_settings
from drumline.audit.prove import Outcome, Proof
from drumline.cli import train_command
from drumline.config import PRESETS, Flags, read_flags, read_layers, resolve
from drumline.config.schema import Count, Seed
from drumline.errors import ConfigError, DrumlineError, ExitCode, UsageError
from drumline.launch.topology import topology_from
from drumline.launch.torch_import import loading
from drumline.text import plural
from drumline.untrusted import make_own_folder
from drumline.user_code import is_class_spec

DEFAULT_STEPS = 8
OWN_FLAGS: Mapping[str, tuple[Any, str, str]] = {
    "world": (
        tuple[Count, ...],
        "N[,N...]",
        "Ranks of each leg [1]. 4,2,3 starts on 4 ranks, is killed, goes on with 2, is killed, and ends "
        "on 3; one number is one kill. The run without kills has the first number. Different numbers turn on "
        "--train.exact elastic.",
    ),
    "steps": (Count, "N", f"Optimizer steps of the whole run [{DEFAULT_STEPS}]."),
    "kill-at": (tuple[Count, ...], "STEP[,STEP...]", "No kill before this step, one for each kill [random]."),
    "kill-in": (
        Literal["step", "save", "evaluation", "any"],
        "step | save | evaluation | any",
        "What the job is in the middle of when it is killed [any: random].",
    ),
    "kill-rank": (str, "RANK | all", "Which rank is killed [random]."),
    "seed": (Seed, "N", "What is random in the kills follows from it [random, and printed]."),
    "keep": (str, "DIR", "Keep the run folders here [a temporary folder, kept if the proof fails]."),
    "config": train_command.OWN_FLAGS["config"],
    "help": (bool, "", "Show this text."),
}
# Of `drumline train`, and what takes their place here.
ELSEWHERE = {
    "procs": "--world says how many ranks each leg has",
    "max-restarts": "a killed leg is resumed by the proof itself",
    "run": "--keep DIR says where the run folders stay",
    "fresh": "every proof begins a new run",
}
USAGE = """\
usage: drumline prove-resume TASK [--world N[,N...]] [--steps N] [--section.name value ...]

Trains TASK for a few steps without a kill; then once more, killed with -9 and resumed; and compares every
sample, weight, optimizer state and evaluation, bit by bit. The settings are those of `drumline train TASK`.
"""
EXIT_CODES = """\
exit codes: 0 proved, 1 not proved, or a run failed, 2 wrong usage, 3 a run was stopped before its first step
            (ranks that do not agree, data that is missing), 130 interrupted
"""


def run(argv: Sequence[str]) -> int:
    """The verb: 0 proved, 1 not, 2 wrong usage; or what a run that failed by itself ended with."""
    own = {**{name: train_command.OWN_FLAGS[name] for name in ELSEWHERE}, **OWN_FLAGS}
    flags = read_flags(argv, own, max_positional=1)
    if flags.own.get("help"):
        terminal.show(_help(), end="")
        return ExitCode.SUCCESS
    if topology_from(os.environ) is not None:
        raise UsageError(
            "prove-resume starts its ranks itself, but a launcher has started this process as one",
            next_step="run it without torchrun or srun",
        )
    options, arguments, changes = _settle(flags)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, _leave)  # what was started is then ended too
    keep = flags.own.get("keep")
    with _folder(keep) as folder:
        say(f"kills are drawn from --seed {options.seed}")
        if changes:
            say(f"changed for the proof: {changes}")
        code = _prove(options, arguments, folder)
        if code == ExitCode.SUCCESS and keep is None:
            shutil.rmtree(folder)
        else:
            say(f"  folder: {folder}")
    return code


def _settle(flags: Flags) -> tuple[ProofOptions, list[str], str]:
    """The options, the arguments of `drumline train`, and what is changed in them; every mistake is said at once, and
    before torch is imported: what depends on the user's own task, whose file imports it, comes last."""
    task, file = flags.positional[0] if flags.positional else None, flags.own.get("config")
    layers = read_layers(flags, config_file=Path(file) if file else None, environment={})
    options = _options(flags)
    problems = [f"--{name}: {reason}" for name, reason in ELSEWHERE.items() if name in flags.own]
    problems += _wrong_command(task, flags)
    are_known = not any(problem.startswith(("--world", "--steps")) for problem in problems)
    if are_known:
        problems += wrong_options(options)
    problems += wrong_settings(layers, options)
    defaults = _defaults(task) if task in PRESETS or not problems else {}
    settings = ProofSettings(layers, defaults, options)
    if are_known and (task in PRESETS or not problems):
        problems += settings.problems()
    if problems or task is None:
        raise ConfigError(problems, next_step="`drumline prove-resume --help` says what it takes")
    arguments = settings.arguments(task, config_file=file)
    given = read_flags(arguments, train_command.OWN_FLAGS, max_positional=1)
    ranks_layers = read_layers(given, config_file=Path(file) if file else None, environment=os.environ)
    resolve(ranks_layers, defaults, task=task)  # what each rank would refuse is said here, once
    return options, arguments, settings.describe_changes()


def _wrong_command(task: str | None, flags: Flags) -> Iterator[str]:
    try:
        train_command.settle_before_torch(task, flags)
    except ConfigError as error:
        yield from error.problems
    file = (task or "").rpartition(":")[0]
    if file.endswith(".py") and not Path(file).is_file():
        yield f"{task!r}: there is no file {file} (looked in {Path.cwd()})"


def _defaults(task: str | None) -> Mapping[str, Any]:
    """What the task says of its settings. One of the user's own is loaded for that, as each rank does it."""
    if task is None or not is_class_spec(task):
        return PRESETS[task].defaults if task and task in PRESETS else {}

    with loading():
        from drumline.tasks.task_registry import load_task

    try:
        return load_task(task).defaults
    except DrumlineError:
        raise
    except Exception as error:
        raise UsageError(
            f"{task} cannot be loaded: {type(error).__name__}: {error}",
            next_step=f"make `drumline train {task}` start first",
        ) from error


def _options(flags: Flags) -> ProofOptions:
    seed = flags.own.get("seed")
    return ProofOptions(
        worlds=worlds_of(flags.own.get("world") or (1,)),
        steps=flags.own.get("steps", DEFAULT_STEPS),
        seed=random.SystemRandom().randrange(10**6) if seed is None else seed,
        at=flags.own.get("kill-at"),
        moment=None if (moment := flags.own.get("kill-in")) == "any" else moment,
        rank=flags.own.get("kill-rank"),
    )


def _prove(options: ProofOptions, arguments: list[str], folder: Path) -> int:
    legs = ", ".join(map(str, options.worlds))
    if options.is_elastic:
        say(f"the legs have different numbers of ranks ({legs}): --train.exact elastic is on")
    outcome = Proof(options, arguments, folder, say).run()
    for line in verdict(outcome):
        say(line)
    return ExitCode.SUCCESS if outcome.found is None else ExitCode.TRAINING_FAILED


def verdict(outcome: Outcome) -> Iterator[str]:
    """The lines that say what came out."""
    if outcome.found is None:
        steps, kills = plural(outcome.steps, "step"), plural(outcome.kills, "kill")
        seen = f"{plural(outcome.samples, 'sample')}, {plural(outcome.tensors, 'tensor')}"
        yield f"proved: {steps}, {seen}: the same bits after {kills}"
        for name in outcome.unsaved:
            yield (
                f"  note: the buffer {name} (persistent=False) is in no checkpoint and was not the same at every step; "
                "nothing that was compared depends on it"
            )
        return
    yield f"not proved: {outcome.found.difference.sentence} [leg {outcome.found.leg}]"
    yield f"  likely cause: {outcome.found.cause.what}"
    yield f"  next: {outcome.found.cause.next_step}"


def say(line: str) -> None:
    terminal.show_lines([line])


@contextmanager
def _folder(keep: str | None) -> Iterator[Path]:
    """Where the runs are. One of our own goes when there is nothing to look at in it: a wrong command, Ctrl-C."""
    folder = Path(tempfile.mkdtemp(prefix="drumline-prove-")) if keep is None else _new_folder(Path(keep))
    try:
        yield folder
    except (UsageError, KeyboardInterrupt, SystemExit) as error:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
        if not isinstance(error, UsageError):
            left = "nothing of it is left" if keep is None else f"what it wrote so far is in {folder}"
            with suppress(OSError):  # the terminal may be gone
                terminal.print_message(f"interrupted; {left}")
        raise


def _new_folder(folder: Path) -> Path:
    try:
        make_own_folder(folder, follow_links=True)
        is_empty = not any(folder.iterdir())
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        verb = "written" if folder.is_dir() else "made"
        raise UsageError(
            f"the folder {folder} cannot be {verb}: {error.strerror}",
            next_step="choose another with --keep DIR",
        ) from error
    if not is_empty:
        raise UsageError(
            f"the folder {folder} is not empty", next_step="choose another with --keep DIR, or empty it"
        )
    return folder


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _help() -> str:
    from drumline.config.help import render_entry

    width = shutil.get_terminal_size().columns
    own = [render_entry(f"--{name}", takes, doc, width=width) for name, (_, takes, doc) in OWN_FLAGS.items()]
    return "\n".join([USAGE, *own, "", EXIT_CODES])

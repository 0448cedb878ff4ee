"""`drumline prove-resume TASK`: reads the wishes, lets `prove` do the work, and prints the verdict."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NoReturn

from drumline.cli import train
from drumline.config import Flags, Layers, read_flags, read_layers
from drumline.config.schema import Count, Seed
from drumline.errors import ConfigError, ExitCode, UsageError
from drumline.launch.topology import topology_from
from drumline.prove.proof import Outcome, Proof
from drumline.prove.schedule import Wishes, worlds_of, wrong_wishes
from drumline.prove.settings import train_arguments, wrong_settings

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
    "config": train.OWN_FLAGS["config"],
    "help": (bool, "", "Show this text."),
}
USAGE = """\
usage: drumline prove-resume TASK [--world N[,N...]] [--steps N] [--section.name value ...]

Trains TASK for a few steps without a kill; then once more, killed with -9 and resumed; and compares every
sample, weight and optimizer state, bit by bit. The settings are those of `drumline train TASK`.
"""


def run(argv: Sequence[str]) -> int:
    """The verb: 0 proved, 1 not, 2 wrong usage."""
    flags = read_flags(argv, own={name: kind for name, (kind, *_) in OWN_FLAGS.items()}, max_words=1)
    if flags.own.get("help"):
        print(_help(), end="")
        return ExitCode.SUCCESS
    if topology_from(os.environ) is not None:
        raise UsageError(
            "prove-resume starts its ranks itself, but a launcher has started this process as one",
            next_step="run it without torchrun or srun",
        )
    wishes, arguments = _settle(flags)
    signal.signal(signal.SIGTERM, _leave)  # what was started is then ended too
    keep = flags.own.get("keep")
    with _folder(keep) as folder:
        code = _prove(wishes, arguments, folder)
        if code == ExitCode.SUCCESS and keep is None:
            shutil.rmtree(folder)
        else:
            say(f"  folder: {folder}")
    return code


def _settle(flags: Flags) -> tuple[Wishes, list[str]]:
    """The wishes and the arguments of `drumline train`; every mistake is said at once, and before torch is imported."""
    task, file, seed = flags.words[0] if flags.words else None, flags.own.get("config"), flags.own.get("seed")
    problems: list[str] = []
    try:
        train.settle_before_torch(task, flags)
    except ConfigError as error:
        problems += error.problems
    layers: Layers = read_layers(flags, config_file=Path(file) if file else None, environment={})
    wishes = Wishes(
        worlds=worlds_of(flags.own.get("world") or (1,)),
        steps=flags.own.get("steps", DEFAULT_STEPS),
        seed=random.SystemRandom().randrange(10**6) if seed is None else seed,
        at=flags.own.get("kill-at"),
        moment=None if (moment := flags.own.get("kill-in")) == "any" else moment,
        rank=flags.own.get("kill-rank"),
    )
    if not any(problem.startswith(("--world", "--steps")) for problem in problems):
        problems += wrong_wishes(wishes)
    problems += wrong_settings(layers, wishes)
    if problems or task is None:
        raise ConfigError(problems, next_step="`drumline prove-resume --help` says what it takes")
    arguments = train_arguments(task, layers, wishes, config_file=file)
    own = {name: kind for name, (kind, *_) in train.OWN_FLAGS.items()}
    train.settle_before_torch(task, read_flags(arguments, own=own, max_words=1))
    return wishes, arguments


def _prove(wishes: Wishes, arguments: list[str], folder: Path) -> int:
    legs = ", ".join(map(str, wishes.worlds))
    say(f"kills are drawn from --seed {wishes.seed}")
    if wishes.is_elastic:
        say(f"the legs have different numbers of ranks ({legs}): --train.exact elastic is on")
    outcome = Proof(wishes, arguments, folder, say).run()
    for line in verdict(outcome):
        say(line)
    return ExitCode.SUCCESS if outcome.found is None else ExitCode.TRAINING_FAILED


def verdict(outcome: Outcome) -> Iterator[str]:
    """The lines that say what came out."""
    kills = f"{outcome.kills} kill{'s' if outcome.kills > 1 else ''}"
    if outcome.found is None:
        yield (
            f"proved: {outcome.steps} steps, {outcome.samples:,} samples, {outcome.tensors} tensors: "
            f"the same bits after {kills}"
        )
        return
    yield f"not proved: {outcome.found.difference.sentence} [leg {outcome.found.leg}]"
    yield f"  likely cause: {outcome.found.cause.what}"
    yield f"  next: {outcome.found.cause.next_step}"


def say(line: str) -> None:
    print(line, flush=True)


@contextmanager
def _folder(keep: str | None) -> Iterator[Path]:
    """Where the runs are. One of our own goes when there is nothing to look at in it: a wrong command, Ctrl-C."""
    folder = Path(tempfile.mkdtemp(prefix="drumline-prove-")) if keep is None else _new_folder(Path(keep))
    try:
        yield folder
    except (UsageError, KeyboardInterrupt, SystemExit):
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _new_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"the folder {folder} cannot be made: {error.strerror}",
            next_step="choose another with --keep DIR",
        ) from error
    if any(folder.iterdir()):
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
    return "\n".join([USAGE, *own, ""])

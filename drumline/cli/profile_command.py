"""`drumline profile TASK|SCRIPT.py|RUN`: profiles some steps of a job on every rank and shows where their time goes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drumline.cli import train_command
from drumline.cli.launch_command import split_command
from drumline.cli.launch_request import is_script
from drumline.cli.profile_report import profile_of, show_profile
from drumline.config import PRESETS, Flags, FlagTable, read_flags
from drumline.config.fields import flag_text
from drumline.config.help import render_flags
from drumline.config.schema import MOST_PROFILED, Count
from drumline.engine.run_folder import run_name
from drumline.errors import ConfigError, ExitCode, UsageError
from drumline.launch.topology import own_variables, topology_from
from drumline.python_api import run_command
from drumline.scale.advice import Advice, advise
from drumline.scale.advice_trial import QUIET, AdviceTrial, ShortRuns, trial_lines, try_advice
from drumline.scale.network_model import doctor_numbers
from drumline.scale.profile_result import PROFILE_FOLDER, ProfileResult, read_profile
from drumline.terminal import print_message, show, show_lines
from drumline.text import plural
from drumline.untrusted import parse_json, read_regular

WARM_UP, STEPS = 10, 10
OWN_FLAGS: FlagTable = {
    "steps": (Count, "N", f"How many steps to profile, after {WARM_UP} to warm up [{STEPS}]."),
    "procs": (Count, "N", "Ranks to start on this machine [one per GPU, or 1]."),
    "doctor": (str, "FILE", "What `drumline doctor --collectives --json` printed, to compare bandwidths with."),
    "try": (bool, "", "Run the task with each change that is proposed, and report what it brings."),
    "config": train_command.OWN_FLAGS["config"],
    "run": (str, "DIR", "The folder of the profile [runs/profile/NAME-TIME]."),
    "json": (bool, "", "Print one JSON object, for scripts."),
    "help": (bool, "", "Show this text."),
}
USAGE = """\
usage: drumline profile TASK [--procs N] [--steps N] [--try] [--section.name value ...]
       drumline profile [--procs N] [--steps N] SCRIPT.py [arguments]
       drumline profile RUN

Runs some steps of a task, or of any script that torchrun could start, with torch.profiler on every rank, and prints
where the time of a step goes, and what to change. A script is ended after these steps. With a run folder it shows the
profile in it again. `drumline train --log.profile 10:20` profiles steps of a whole run, `drumline launch --profile
10:20` those of a script, on any hosts.

Traces of each rank, and of all ranks by one clock, are in DIR/profile; they open in https://ui.perfetto.dev.
"""
FIXED = {"train.steps": "give --steps", "train.epochs": "give --steps", "log.profile": "give --steps"}
OF_NEW = ("steps", "procs", "config", "run")
STILL: Mapping[str, Any] = {**QUIET, "optim.warmup_steps": 0}
"""The settings of the run: between its steps there is nothing else to profile."""


def run(argv: Sequence[str]) -> int:
    """All mistakes in the command are reported before torch is imported."""
    own, target, arguments = split_command(argv, OWN_FLAGS)
    of_script = target is not None and is_script(target)
    of_folder = target is not None and not of_script and _is_run(target)
    no_settings = "is a setting of a run; the profile of a run folder takes none" if of_folder else None
    flags = read_flags(own if of_script else argv, OWN_FLAGS, max_positional=1, no_settings=no_settings)
    if flags.own.get("help"):
        show("\n".join([USAGE, render_flags({"": OWN_FLAGS})]), end="")
        return ExitCode.SUCCESS
    _check(flags, target, of_script=of_script, of_folder=of_folder)
    if target is not None and of_folder:
        return _report(flags, _result(Path(target), flags), Path(target), can_try=False)
    folder = Path(flags.own.get("run") or f"runs/profile/{_name(target)}-{time.strftime('%Y%m%d-%H%M%S')}")
    steps = f"{WARM_UP}:{WARM_UP + flags.own.get('steps', STEPS)}"
    procs = [f"--procs={flags.own['procs']}"] if "procs" in flags.own else []
    words = [
        "launch",
        f"--profile={steps}",
        f"--profile-to={folder}",
        "--profile-only",
        *procs,
        str(target),
        *arguments,
    ]
    if not of_script:
        length = {"train.steps": int(steps.partition(":")[2]) + 1, "log.profile": steps}
        words = ["train", *task_words(flags, {**STILL, **length}), f"--run={folder}", "--max-restarts=0", *procs]
    print_message(f"profiling {target}: {plural(flags.own.get('steps', STEPS), 'step')}, traces in {folder}")
    if code := run_command(words, own_variables(), sys.stderr if flags.own.get("json") else None):
        return code
    return _report(flags, _result(folder, flags), folder, can_try=not of_script)


def task_words(flags: Flags, changed: Mapping[str, Any]) -> list[str]:
    """What follows `drumline train`: the task, the user's settings, and others in place of some."""
    settings = {path: setting.value for path, setting in flags.layer.settings.items()}
    file = [f"--config={flags.own['config']}"] if "config" in flags.own else []
    return [
        *flags.positional,
        *file,
        *(f"--{path}={flag_text(value)}" for path, value in {**settings, **changed}.items()),
    ]


def _is_run(target: str) -> bool:
    """Whether it is a run folder: a task comes before a folder of its name that has no profile."""
    return (Path(target) / PROFILE_FOLDER).is_dir() or (target not in PRESETS and Path(target).is_dir())


def _check(flags: Flags, target: str | None, *, of_script: bool, of_folder: bool) -> None:
    problems = list(flags.layer.problems) if of_script or of_folder else []
    if of_folder:
        unused = [name for name in OF_NEW if name in flags.own]
        problems += [f"--{name}: is for a new profile, but a run folder was given" for name in unused]
    problems += [f"--{path}: {instead}" for path, instead in FIXED.items() if path in flags.layer.settings]
    if flags.own.get("steps", 1) > MOST_PROFILED:
        problems.append(f"--steps: at most {MOST_PROFILED:,}")
    if of_script and flags.own.get("try"):
        problems.append("--try: is for tasks, whose settings can be changed")
    if topology_from(own_variables()) is not None:
        problems.append("drumline profile starts ranks itself, but a launcher has started this process as a rank")
    if problems:
        raise ConfigError(problems, next_step="`drumline profile --help` lists all flags")
    if target is not None and (of_script or of_folder):
        if of_folder and not (Path(target) / PROFILE_FOLDER).is_dir():
            read_profile(Path(target))  # raises
        if of_script and not Path(target).is_file():
            raise UsageError(f"there is no file {target} (looked in {Path.cwd()})")
        return
    train_command.settle_before_torch(target, flags)


def _name(target: str | None) -> str:
    return Path(str(target)).stem if is_script(str(target)) else run_name(str(target))


def _result(folder: Path, flags: Flags) -> ProfileResult:
    network = network_from(Path(flags.own["doctor"])) if "doctor" in flags.own else None
    return profile_of(folder, network_bytes_per_s=network)


def network_from(path: Path) -> float:
    """The bus bandwidth, in bytes/s, that `doctor --json` measured on the slowest rank."""
    try:
        ranks = doctor_numbers(parse_json(read_regular(path, follow_links=True)))
        return min(float(numbers["all_reduce_gb_per_s"]) for numbers in ranks) * 1e9
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise UsageError(
            f"{path} has no bandwidth of collectives: {error!r}",
            next_step=f"drumline doctor --collectives --json > {path}",
        ) from None


def _report(flags: Flags, result: ProfileResult, folder: Path, *, can_try: bool) -> int:
    """Print the profile, the advice and, with --try, what the changes brought."""
    if flags.own.get("try") and not can_try:
        raise UsageError("--try runs the task, but a run folder was given", next_step="drumline profile TASK --try")
    found = advise(result)
    is_json = bool(flags.own.get("json"))
    if not is_json:
        show_profile(result, found, folder)
    trials = _try(flags, result, found, folder) if flags.own.get("try") else None
    if is_json:
        tried = {} if trials is None else {"trials": [one.document() for one in trials]}
        show(json.dumps({**asdict(result), "advice": [asdict(one) for one in found], **tried}), is_data=True)
    elif trials:
        show_lines(["", "tried", *(f"  {line}" for line in trial_lines(trials))])
    return ExitCode.SUCCESS


def _try(flags: Flags, result: ProfileResult, found: Sequence[Advice], folder: Path) -> list[AdviceTrial]:
    runs = ShortRuns(
        arguments=lambda changed: task_words(flags, {"optim.warmup_steps": 0, **changed}),
        procs=result.world_size,
        folder=folder / "trials",
        step_s=result.step_s,
        batch_size=result.batch_size or 1,
    )
    return try_advice(found, runs, note=print_message)

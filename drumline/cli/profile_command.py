"""`drumline profile TASK|SCRIPT.py|RUN`: profiles some steps of a job on every rank and shows where
their time goes."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from drumline.base.errors import DrumlineError, ExitCode, UsageError
from drumline.base.rank_environment import own_variables
from drumline.base.text import plural, print_message, show_lines
from drumline.cli import train_command
from drumline.cli.command_line import (
    OUTPUT_FLAGS,
    check_command,
    check_no_rank,
    misplaced,
    show_help,
    show_json,
)
from drumline.cli.launch_request import is_script
from drumline.cli.profile_report import profile_of, show_profile
from drumline.config import PRESETS, Flags, FlagTable, read_flags, switch
from drumline.config.rules import MOST_PROFILED
from drumline.config.schema import Count
from drumline.report.profile.advice import advise
from drumline.runs.profile_result import PROFILE_FOLDER, ProfileResult
from drumline.runs.run_folder import run_name
from drumline.tools.profile.advice_trial import (
    LAP_STEPS,
    LOG_EVERY,
    QUIET,
    AdviceTrial,
    ShortRuns,
    trial_lines,
    try_advice,
)
from drumline.tools.scale.network_model import read_doctor
from drumline.training.python_api import run_command

WARM_UP = 10
STEPS = 10
OWN_FLAGS: FlagTable = {
    "steps": (Count, "N", f"How many steps to profile, after {WARM_UP} to warm up [{STEPS}]."),
    "procs": (Count, "N", "Ranks to start on this machine [one per GPU, or 1]."),
    "doctor": (
        str,
        "FILE",
        "What `drumline doctor --collectives --json` printed, to compare bandwidths with.",
    ),
    "try": switch("Run the task with each change that is proposed, and report what it brings."),
    **train_command.CONFIG_FLAG,
    "run": (str, "DIR", "The folder of the profile [runs/profile/NAME-TIME]."),
    **OUTPUT_FLAGS,
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
FIXED = ("train.steps", "train.epochs", "log.profile")
OF_NEW = ("steps", "procs", "config", "run")
NO_SETTINGS = (
    "is a setting of a task; arguments of a script go after its name, a run folder takes none"
)


def run(argv: Sequence[str]) -> int:
    """All mistakes in the command are reported before torch is imported."""
    names = read_flags(argv, OWN_FLAGS, ends_at_name=True).positional
    target = names[0] if names else ""
    of_script = is_script(target)
    of_folder = target != "" and not of_script and _is_run(target)
    flags = read_flags(
        argv,
        OWN_FLAGS,
        max_positional=1,
        ends_at_name=of_script,
        no_settings=NO_SETTINGS if of_script or of_folder else None,
    )
    show_help(flags, {"": OWN_FLAGS}, USAGE)
    check_no_rank("profile")
    _check(flags, target, of_script=of_script, of_folder=of_folder)
    network = None
    if "doctor" in flags.values:
        ranks = read_doctor("--doctor", Path(flags.values.doctor))
        network = min(numbers["all_reduce_gb_per_s"] for numbers in ranks) * 1e9

    folder = Path(target)
    if not of_folder:
        name = folder.stem if of_script else run_name(target)
        folder = Path(flags.values.run or f"runs/profile/{name}-{time.strftime('%Y%m%d-%H%M%S')}")
        if code := _profile(flags, folder, of_script=of_script):
            return code
        if not (folder / PROFILE_FOLDER).is_dir():
            raise DrumlineError(
                f"no step of {target} was profiled",
                next_step="read what rank 0 printed above: which steps were looked for, and why there were none",
            )

    return _report(flags, profile_of(folder, network_bytes_per_s=network), folder)


def _profile(flags: Flags, folder: Path, *, of_script: bool) -> int:
    """Run the script, or else the task, with the profiler; its exit code."""
    num_steps = flags.values.get("steps", STEPS)
    steps = f"{WARM_UP}:{WARM_UP + num_steps}"
    procs = [f"--procs={flags.values['procs']}"] if "procs" in flags.values else []
    if of_script:
        words = [
            "launch",
            f"--profile={steps}",
            f"--profile-to={folder}",
            "--profile-only",
            *procs,
            *flags.positional,
        ]
    else:
        changed = {**QUIET, "train.steps": WARM_UP + num_steps + 1, "log.profile": steps}
        words = [
            "train",
            *train_command.task_words(flags, changed),
            f"--run={folder}",
            "--max-restarts=0",
            *procs,
        ]

    print_message(
        f"profiling {flags.positional[0]}: {plural(num_steps, 'step')}, traces in {folder}"
    )
    return run_command(words, own_variables(), sys.stderr if flags.values.json else None)


def _is_run(target: str) -> bool:
    """Whether it is a run folder: a task comes before a folder of its name that has no profile."""
    return (Path(target) / PROFILE_FOLDER).is_dir() or (
        target not in PRESETS and Path(target).is_dir()
    )


def _check(flags: Flags, target: str, *, of_script: bool, of_folder: bool) -> None:
    """Raise with all mistakes of the command line."""
    problems = list(flags.layer.problems) if of_script or of_folder else []
    if of_folder:
        reason = "is for a new profile, but a run folder was given"
        problems += misplaced(flags.values, OF_NEW, reason)

    problems += misplaced(flags.layer.settings, FIXED, "give --steps")
    if flags.values.get("steps", 1) > MOST_PROFILED:
        problems.append(f"--steps: at most {MOST_PROFILED:,}")
    if flags.values.get("try") and (of_script or of_folder):
        problems.append("--try: is for tasks, whose settings can be changed")

    check_command("profile", problems)
    if of_script and not Path(target).is_file():
        raise UsageError(f"there is no file {target} (looked in {Path.cwd()})")
    if not of_script and not of_folder:
        train_command.settle_before_torch(flags)


def _report(flags: Flags, result: ProfileResult, folder: Path) -> int:
    """Print the profile, the advice and, with --try, what the changes brought."""
    advice = advise(result)
    trials = list[AdviceTrial]()
    is_json = bool(flags.values.json)
    tries = bool(flags.values.get("try"))
    if not is_json:
        show_profile(result, advice, folder)
    if tries:
        runs = ShortRuns(
            arguments=partial(train_command.task_words, flags),
            procs=result.world_size,
            folder=folder / "trials",
            step_s=result.step_s,
            batch_size=result.batch_size or 1,
            log_every=int(result.settings.get(LOG_EVERY, LAP_STEPS[-1])),
            has_pauses=bool(result.pauses_s),
        )
        trials = try_advice(advice, runs, note=print_message)

    if is_json:
        tried = {"trials": [trial.document() for trial in trials]} if tries else {}
        show_json({**asdict(result), "advice": advice, **tried})
    elif trials:
        show_lines(["", "tried", *(f"  {line}" for line in trial_lines(trials))])

    return ExitCode.SUCCESS

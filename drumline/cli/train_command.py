"""`drumline train TASK`: checks the configuration, then starts ranks, joins as one, or trains
alone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from drumline.base.errors import (
    ConfigError,
    ExitCode,
    MissingExtraError,
    UsageError,
    did_you_mean,
)
from drumline.base.json_output import FORMAT, wrap_output
from drumline.base.rank_environment import let_first_rank_report, topology_from
from drumline.base.startup import (
    INTERRUPTED_EARLY,
    default_procs,
    interruptible,
    loading,
    use_private_cache,
)
from drumline.base.text import show
from drumline.base.user_code import is_class_spec
from drumline.config import (
    PRESETS,
    Flags,
    FlagTable,
    Layers,
    check_layers,
    read_flags,
    read_layers,
    resolve,
    switch,
)
from drumline.config.fields import flag_text, task_fields
from drumline.config.flags import Layer
from drumline.config.schema import Count, CountOrZero
from drumline.launch.node_plan import TASK_RESTARTS, NodePlan, Program, Supervision
from drumline.runs.run_folder import default_run

METRICS_PACKAGES = ("prometheus_client", "pynvml")
CONFIG_FLAG: FlagTable = {
    "config": (
        str,
        "FILE",
        "A TOML file of settings; flags override it. A run's own config.toml is such a file.",
    )
}
PROCS_FLAG: FlagTable = {
    "procs": (
        Count,
        "N",
        "Ranks to start on this machine [one per GPU, or 1]; not under torchrun or srun.",
    )
}
OWN_FLAGS: FlagTable = {
    **CONFIG_FLAG,
    "run": (
        str,
        "DIR",
        "The run folder [runs/TASK]. The same command again resumes the run in it.",
    ),
    **PROCS_FLAG,
    "max-restarts": (
        CountOrZero,
        "N",
        f"How often --procs restarts ranks that hang, crash or are killed; they resume from the newest checkpoint "
        f"[{TASK_RESTARTS}]. A failure that a restart cannot fix is not retried.",
    ),
    "fresh": switch("Start over: an earlier run in the folder is moved aside, not deleted."),
    "help": switch("Show this text; with a TASK, its defaults and its own settings."),
}
USAGE = (
    "usage: drumline train TASK [--procs N] [--max-restarts N] [--run DIR] [--fresh] [--config FILE] "
    "[--section.name value ...]"
)


def run(argv: Sequence[str]) -> int:
    """All mistakes in the command are reported before torch is imported."""
    flags = read_flags(argv, OWN_FLAGS, max_positional=1)
    if flags.values.help:
        show(_help(next(iter(flags.positional), None)), end="")
        return ExitCode.SUCCESS
    topology = topology_from(os.environ)
    procs = flags.values.procs
    if topology is not None and procs not in (None, topology.local_world_size):
        let_first_rank_report(topology)
        raise UsageError(
            f"--procs is {procs}, but a launcher has started {topology.local_world_size} ranks here",
            next_step="leave --procs out, or run drumline train without a launcher",
        )
    task, layers = task_on_ranks(flags)
    folder = run_folder(flags, task)
    fresh = bool(flags.values.fresh)

    def run_rank() -> int:
        from drumline.cli import train_rank

        return train_rank.run_rank(task, layers, folder=folder, fresh=fresh, argv=argv)

    return run_on_ranks("train", argv, flags, layers, run_rank, run=folder)


def task_on_ranks(flags: Flags) -> tuple[str, Layers]:
    """The task of a command that runs on ranks, and its settings: of several ranks with the same
    mistake, the first reports it."""
    try:
        return settle_before_torch(flags)
    except ConfigError:
        let_first_rank_report(topology_from(os.environ))
        raise


def settle_before_torch(flags: Flags) -> tuple[str, Layers]:
    """The task, and its settings, checked as far as possible without the user's own code; all
    mistakes are reported at once."""
    task = flags.positional[0] if flags.positional else None
    layers = read_layers(flags, config_file=flags.values.config, environment=os.environ)
    if task is None:
        problem = f"no TASK was given: one of {', '.join(PRESETS)}, or path/to/file.py:ClassName"
    elif task not in PRESETS and not is_class_spec(task):
        hint = f"add the class, as in {task}:ClassName" if task.endswith(".py") else None
        problem = f"{task!r}: there is no such task; {hint or did_you_mean(task, PRESETS)}"
    else:
        # The defaults of the user's own task are not known yet: its file imports torch.
        if is_class_spec(task):
            check_layers(layers)
        else:
            resolve(layers, PRESETS[task].defaults, task=task)
        if value_of(layers, "log.prometheus") is not None:
            check_metrics_extra("--log.prometheus")
        if log_format := value_of(layers, "log.format"):
            os.environ[FORMAT] = log_format
        return task, layers

    try:
        check_layers(layers)
    except ConfigError as error:
        raise ConfigError([problem, *error.problems], next_step=error.next_step) from None

    raise ConfigError([problem], next_step="`drumline train --help` lists the tasks")


def value_of(layers: Iterable[Layer], path: str) -> Any:
    """What the user gave for a setting; None: nothing."""
    return next((layer.settings[path].value for layer in layers if path in layer.settings), None)


def check_metrics_extra(feature: str) -> None:
    """Before torch is loaded, and before the sidecars start."""
    if not all(map(find_spec, METRICS_PACKAGES)):
        raise MissingExtraError(feature, extra="prometheus")


def task_words(flags: Flags, changed: Mapping[str, Any]) -> list[str]:
    """What follows `drumline train`: the task, the user's settings, and others in place of some."""
    settings = {path: setting.value for path, setting in flags.layer.settings.items()}
    file = [f"--config={flags.values['config']}"] if "config" in flags.values else []
    return [
        *flags.positional,
        *file,
        *(f"--{path}={flag_text(value)}" for path, value in {**settings, **changed}.items()),
    ]


def run_folder(flags: Flags, task: str) -> Path:
    return Path(flags.values.run or default_run(task))


def run_on_ranks(
    verb: str,
    argv: Sequence[str],
    flags: Flags,
    layers: Iterable[Layer],
    run_rank: Callable[[], int],
    *,
    run: Path | None = None,
) -> int:
    """Start the ranks of a verb on this machine, or be the rank that this process is; returns the
    exit code. `layers`: the settings, flags first. `run_rank`: the work of one rank, with torch.
    `run`: the folder of a run that the same command resumes."""
    wrap_output()
    topology = topology_from(os.environ)
    # Among several ranks the launcher reports an interrupt.
    with interruptible(INTERRUPTED_EARLY if topology is None else ""):
        if topology is None:
            num_procs = flags.values.procs or _usual_procs(layers)
            max_restarts = flags.values.max_restarts
            if num_procs > 1 or max_restarts:
                if max_restarts is None:
                    max_restarts = 0 if run is None else TASK_RESTARTS
                folder = None if run is None else str(run)
                program = Program((verb, *argv), is_task=True, run=folder)
                return _start(NodePlan(num_procs=num_procs, max_restarts=max_restarts), program)
        use_private_cache()
        with loading():
            import drumline.cli.train_rank  # noqa: F401  # torch, and all that trains
            from drumline.rank.torch_internals import load_compiler

            load_compiler()  # torch does so with the first optimizer, when the collector is on
    return run_rank()


def _usual_procs(layers: Iterable[Layer]) -> int:
    return 1 if value_of(layers, "dist.device") == "cpu" else default_procs()


def _start(node: NodePlan, program: Program) -> int:
    """Start the ranks, and wait for them."""
    from drumline.launch.node.local import run_node

    code = run_node(node, program, Supervision())
    is_failed = code in (ExitCode.TRAINING_FAILED, ExitCode.HANG)
    if is_failed and program.run is not None:  # else rank 0 has done it
        from drumline.report.page import report_at_end

        report_at_end(Path(program.run))
    return code


def _help(task: str | None) -> str:
    """With a task also its defaults and its own settings."""
    from drumline.config.help import render_flags, render_help

    of_task: dict[str, Any] = {}
    if task is not None and task in PRESETS:
        of_task = {"task": task, "task_defaults": PRESETS[task].defaults}
    elif task is not None and is_class_spec(task):
        of_task = _help_of_own_task(task)
    settings = render_help(width=shutil.get_terminal_size().columns, **of_task)
    return "\n".join([USAGE, "", render_flags({"": OWN_FLAGS}), settings])


def _help_of_own_task(spec: str) -> dict[str, Any]:
    """Only this help imports torch, with the user's file."""
    from drumline.config.help import task_docs

    with loading():
        from drumline.training.tasks.base import Task
        from drumline.training.tasks.built_in import load_task

    task = load_task(spec)
    docs = task_docs(task)
    task_settings = {
        path: (field, docs.get(path, "")) for path, field in task_fields(task, Task).items()
    }
    return {"task": task.__name__, "task_defaults": task.defaults, "task_settings": task_settings}

"""Drumline from Python: `drumline.train` and `drumline.load`, for scripts and notebooks.

A run is a command in a process of its own, for one rank too: it leaves no process group, signal
handler, thread, seed or GPU memory behind in the caller's process.
"""

from __future__ import annotations

import codecs
import os
import selectors
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from drumline.base.errors import (
    DrumlineError,
    ExitCode,
    HangError,
    PreflightError,
    TrainingError,
    UsageError,
)
from drumline.base.processes import ending_with_parent
from drumline.base.rank_environment import ERROR_FILE, own_variables, read_error, topology_from
from drumline.base.text import how_it_ended, show
from drumline.config.fields import flag_text
from drumline.runs.catalog import folder_name
from drumline.runs.events import read_events
from drumline.runs.run_folder import RunFolder, default_run, find_run

if TYPE_CHECKING:
    from torch import nn

    from drumline.training.tasks.base import Task

POLL_S = 0.2
KINDS: Mapping[int, type[DrumlineError]] = {
    ExitCode.USAGE: UsageError,
    ExitCode.PREFLIGHT_FAILED: PreflightError,
    ExitCode.HANG: HangError,
}


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    run: Path
    """Its folder."""

    metrics: dict[str, Any]
    """Of the last evaluation."""

    best_checkpoint: Path | None
    """By the metric that the task names; None: no checkpoint was evaluated."""

    events: list[dict[str, Any]] = field(repr=False)
    """All events of rank 0, those of earlier starts included: `pandas.DataFrame(result.events)` is
    a table."""


def train(
    task: type[Task] | str,
    *,
    run: str | os.PathLike[str] | None = None,
    procs: int | None = None,
    fresh: bool = False,
    **settings: Any,
) -> Result:
    """Train a task as `drumline train` does, in processes of its own, and wait for it: with the
    same `run` again it resumes. What the run prints is printed here.

    `task`: a class that is defined in a file, or a name, such as `"digits"` or
    `"my_task.py:MyTask"`. `run`: the run folder. `procs`: ranks on this machine; by default one per
    GPU, or one. `fresh`: move an earlier run aside. `settings`: by dotted name, `**{"optim.lr":
    0.1, "task.width": 64}`; `config="run.toml"` reads a file of them.

    An error of the configuration or of a rank is raised here, as a `DrumlineError` with the rank's
    own message; Ctrl-C stops the run, and raises KeyboardInterrupt.
    """
    variables = own_variables()
    if ERROR_FILE in variables:
        raise UsageError(
            "drumline.train was called by a process that drumline.train has started, when it imported the task",
            next_step='put the call under `if __name__ == "__main__":`',
        )

    if (topology := topology_from(variables)) is not None and topology.world_size > 1:
        raise UsageError(
            f"drumline.train starts its ranks itself, but a launcher has started this process as rank {topology.rank}",
            next_step="run it without torchrun or srun, or use the command drumline train",
        )

    spec = task if isinstance(task, str) else spec_of(task)
    folder = default_run(spec) if run is None else Path(run)
    words = [spec, f"--run={folder}"]
    if fresh:
        words.append("--fresh")
    if procs is not None:
        words.append(f"--procs={procs}")

    words += (f"--{name}={flag_text(value)}" for name, value in _apart(settings))

    with tempfile.TemporaryDirectory(prefix="drumline-train-") as scratch:
        error_file = Path(scratch, "error.json")
        added = {ERROR_FILE: str(error_file), "PYTHONPATH": os.pathsep.join(_own_paths())}
        code = run_command(["train", *words], {**variables, **added})
        if code:
            raise error_of(code, error_file, folder)

    return read_result(folder)


def load(
    run: str | os.PathLike[str],
    which: Literal["best", "last"] | int = "best",
    *,
    ema: bool = False,
    task: type[Task] | str | None = None,
) -> nn.Module:
    """The model of a run, with the weights of a checkpoint, on the CPU and in evaluation mode.

    It imports the code of the task by the name that the run was started with, and builds the model
    with the settings of the checkpoint: load only runs whose code you would run. `which`: the best
    checkpoint by the metric that the task names, the last, or that of a step. `ema`: the average of
    the weights that the task's `EMA` hook kept, which the run was evaluated with. `task`: in place
    of the run's own, for example where its file has moved.
    """
    # not before: it needs torch
    from drumline.training.saved.saved_run import load_model, open_run

    return load_model(open_run(find_run(Path(run)), which, task=task), averaged=ema)


def spec_of(task: type[Any]) -> str:
    """A class, as ranks in other processes find it."""
    name = task.__qualname__
    module = task.__module__
    main = sys.modules["__main__"]
    file = getattr(sys.modules.get(module), "__file__", None)

    if module == "__main__" and (imported := getattr(main, "__spec__", None)) is not None:
        module = imported.name  # python -m package.module
    elif module == "__main__" and not str(file).endswith(".py"):
        raise UsageError(
            f"{name} is defined in a notebook or at the prompt, and ranks are other processes, which cannot import it",
            next_step="put it in a file: begin its cell, imports included, with `%%writefile my_task.py`, and call "
            f"drumline.train('my_task.py:{name}')",
        )

    if "." in name:
        raise UsageError(
            f"{name} is defined inside a function or a class, and ranks are other processes, which cannot import it",
            next_step="define it at the top level of a file",
        )

    # A file by its path, which a command can be given too; a module of a package by its name.
    is_file = "." not in module and str(file).endswith(".py")
    if not is_file:
        return f"{module}:{name}"

    path = Path(str(file)).resolve()
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())

    return f"{path}:{name}"


def _own_paths() -> Iterator[str]:
    """Where this process finds modules, but for what every process of this Python has."""
    installed = {
        sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
    }
    return (path for path in sys.path if path and not path.startswith(tuple(installed)))


def _apart(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """A table of options (`model.options`) becomes one setting per option."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            for option, entry in value.items():
                yield f"{name}.{option}", entry
        else:
            yield name, value


def run_command(
    words: list[str], environment: Mapping[str, str], stream: TextIO | None = None
) -> int:
    """Run `drumline` with these words, show what it prints, on stdout or this stream, and return
    its exit code. It ends with this process."""
    child = subprocess.Popen(
        ending_with_parent([sys.executable, "-m", "drumline", *words]),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # a terminal's Ctrl-C reaches it through this process alone, as a notebook's does
        process_group=0,
    )

    try:
        _show_output(child, stream)
    except KeyboardInterrupt:
        child.send_signal(signal.SIGINT)
        _show_output(child, stream)  # a second Ctrl-C does not wait
        raise
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()

    return child.returncode


def _show_output(child: subprocess.Popen[bytes], stream: TextIO | None) -> None:
    """Until it has ended: a process that it left behind for some seconds may hold the pipe open."""
    assert child.stdout is not None
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while True:
            has_ended = child.poll() is not None
            data = b""
            if selector.select(0 if has_ended else POLL_S):
                data = os.read(child.stdout.fileno(), 1 << 16)
                if not data:
                    child.wait()

            if data:
                show(decoder.decode(data), end="", stream=stream)
            elif has_ended:
                return


def error_of(code: int, error_file: Path, folder: Path) -> BaseException:
    """What a run that has failed raises."""
    if code == ExitCode.INTERRUPTED:
        return KeyboardInterrupt()

    if code == ExitCode.PREEMPTED:
        return TrainingError(
            f"the run in {folder} was preempted, and has saved",
            next_step="call drumline.train again to resume",
        )

    if (record := read_error(error_file)) is None:
        return TrainingError(
            f"the run in {folder} ended early ({how_it_ended(code)})",
            next_step=f"read {folder}/logs",
        )

    error = KINDS.get(code, TrainingError)(
        record.what, next_step=record.next_step, place=record.place
    )

    if record.details:
        error.add_note(record.details)

    return error


def read_result(folder: Path) -> Result:
    """From the events of rank 0."""
    paths = RunFolder(folder)
    events = list(read_events(paths.event_file(0)))
    ends = (event for event in reversed(events) if event["kind"] == "end")
    end: dict[str, Any] = next(ends, {})
    step = end.get("best_step")
    best = None if step is None else paths.checkpoints / folder_name(step)

    return Result(folder, dict(end.get("metrics", {})), best, events)

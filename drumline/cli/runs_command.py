"""`drumline runs [DIR]`: a table of run folders."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from drumline.base.errors import ExitCode, UsageError
from drumline.base.text import columns, duration, file_size, show_lines
from drumline.cli.command_line import OUTPUT_FLAGS, read_command, show_json
from drumline.metrics.display import metric_text
from drumline.report.run_list import ListedRun, list_runs

HELP = """\
usage: drumline runs [DIR] [--json]

Lists the run folders in DIR [runs], the last changed first: task, state, step, result, size, and how long ago a file of
it was last written. `ended early`: a hook, such as EarlyStopping, ended it before its last step. States:

  running     a job trains in it, as far as this machine can see
  done, preempted, failed
              by its last event
  stopped     it ended without one: killed, or interrupted
  own loop    checkpoints of ddp.checkpoint, without events
  corrupt     its settings or events cannot be read; drumline verify reports what is wrong
"""
HEADINGS = ("run", "task", "state", "step", "result", "size", "changed")
MAX_METRICS = 2


def run(argv: Sequence[str]) -> int:
    """A table of the runs in the folder, or JSON."""
    flags = read_command("runs", argv, {"": OUTPUT_FLAGS}, HELP)
    folder = Path(flags.positional[0] if flags.positional else "runs")
    if not folder.is_dir():
        raise UsageError(
            f"there is no folder {folder}", next_step="give the folder that the run folders are in"
        )

    runs = list_runs(folder)
    if flags.values.json:
        show_json(runs, indent=1)
    elif runs:
        show_lines(columns([HEADINGS, *map(_cells, runs)]))
    else:
        show_lines([f"there are no runs in {folder}"])

    return ExitCode.SUCCESS


def _cells(listed: ListedRun) -> tuple[str, ...]:
    """A row of the table."""
    steps = f"{listed.step:,}" + (f"/{listed.total_steps:,}" if listed.total_steps else "")
    if listed.stopped is not None:
        steps += " (ended early)"

    # The loss is there anyway; what the task measures says more.
    names = sorted(listed.metrics, key=lambda name: name == "loss")[:MAX_METRICS]
    result = ", ".join(f"{name} {metric_text(name, listed.metrics[name])}" for name in names)
    age = duration(max(0.0, time.time() - listed.changed))
    return (
        str(listed.run),
        listed.task or "-",
        listed.state,
        steps,
        result or "-",
        file_size(listed.num_bytes),
        f"{age} ago",
    )

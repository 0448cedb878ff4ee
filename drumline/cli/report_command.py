"""`drumline report RUN`: writes runs as one HTML page, or serves it while a run is training;
`train` ends with one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from drumline.base.errors import ExitCode, UsageError
from drumline.base.text import show_lines
from drumline.checkpoint.mirrored_run import opened_run
from drumline.cli.command_line import HELP_FLAG, check_run_is_named, read_command
from drumline.config import FlagTable, switch
from drumline.runs.run_folder import find_run
from drumline.storage.object_store import is_store_url
from drumline.watch.run_status import RunStatusReader

REFRESH_S = 5.0
HELP = """\
usage: drumline report RUN [RUN ...] [--to FILE]
       drumline report --live RUN

Writes one HTML file that needs no network: result, goodput, curves, faults and restarts, a map of slow ranks by time,
the time of a step, environment and settings. Several runs are shown side by side, with what differs. `drumline train`
writes RUN/report.html at its end. RUN may be in an object store: s3://bucket/prefix.
"""
OWN_FLAGS: FlagTable = {
    "to": (
        str,
        "FILE",
        "Where to write it [RUN/report.html; of several runs, or one in an object store, report.html].",
    ),
    "live": switch(
        "Serve the page while the run is training, on 127.0.0.1, updated every 5 s, until it ends or Ctrl-C."
    ),
    **HELP_FLAG,
}


def run(argv: Sequence[str]) -> int:
    """Write the page, or serve it."""
    flags = read_command("report", argv, {"": OWN_FLAGS}, HELP, max_positional=len(argv))
    check_run_is_named("report", flags)
    verb_flags = flags.values
    names = flags.positional
    is_local = not any(map(is_store_url, names))
    if verb_flags.live:
        if len(names) > 1 or verb_flags.to or not is_local:
            what = "--live serves one run folder, and writes no file"
            raise UsageError(what, next_step="give one RUN of this machine, and no --to")
        return _serve(find_run(Path(names[0])))
    from drumline.report.page import REPORT_FILE, write_report

    with ExitStack() as stack:
        folders = [
            _fetched(name, stack) if is_store_url(name) else find_run(Path(name)) for name in names
        ]
        to = Path(REPORT_FILE)
        if verb_flags.to:
            to = Path(verb_flags.to)
        elif len(names) == 1 and is_local:
            to = folders[0] / REPORT_FILE
        try:
            write_report(folders, to)
        except OSError as error:
            what = f"{to} could not be written: {error.strerror}"
            raise UsageError(what, next_step="choose a file with --to") from error
    show_lines([f"report: {to}"])
    return ExitCode.SUCCESS


def _fetched(url: str, stack: ExitStack) -> Path:
    """A copy of the run's records, without its checkpoints."""
    run, folder = stack.enter_context(opened_run(url))
    list(run.fetch_files(folder))
    return folder


def _serve(folder: Path) -> int:
    """Until the run ends; then once more, so that an open page shows the end."""
    from drumline.report.live_server import LiveServer
    from drumline.report.page import render_page
    from drumline.report.run_data import read_run

    reader = RunStatusReader(folder)
    if reader.read().has_ended:
        raise UsageError(
            f"no job trains in {folder}", next_step=f"write its report: drumline report {folder}"
        )

    def render() -> str:
        run = read_run(folder)
        return render_page([run], refresh_s=REFRESH_S if run.state == "running" else None)

    server = LiveServer(render)
    show_lines([f"live report: {server.url} (until the run ends, or Ctrl-C)"])
    try:
        while not (status := reader.read()).has_ended:
            time.sleep(0.5)
        ended = time.monotonic()
        while server.served_at < ended and time.monotonic() < ended + 2 * REFRESH_S:
            time.sleep(0.1)
    finally:
        server.close()
    show_lines([status.message() or "the run has ended"])
    return ExitCode.SUCCESS

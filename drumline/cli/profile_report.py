"""Shows the profile in a run folder: the words, the advice and the trace to open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from drumline.base.errors import DrumlineError
from drumline.base.text import print_message, show_lines
from drumline.report.profile.advice import advise
from drumline.report.profile.bottleneck import Advice, advice_lines
from drumline.report.profile.profile_words import words_of
from drumline.runs.profile_files import where_to_look
from drumline.runs.profile_result import PROFILE_FILE, PROFILE_FOLDER, ProfileResult, read_profile
from drumline.watch.status_file import read_step_times


def profile_of(folder: Path, *, network_bytes_per_s: float | None = None) -> ProfileResult:
    """The profile, with what is known about all steps of the run by now; it is made again if
    bandwidths are to be compared, or there are only traces."""
    traces = folder / PROFILE_FOLDER
    is_made = not traces.is_dir() or (traces / PROFILE_FILE).exists()
    if is_made and network_bytes_per_s is None:
        result = read_profile(folder)
    else:
        # not before: it needs numpy
        from drumline.tools.profile.profile_analysis import analyse

        result = analyse(folder, network_bytes_per_s=network_bytes_per_s)
    return replace(result, run_steps=read_step_times(folder))


def show_profile(result: ProfileResult, advice: Sequence[Advice], folder: Path) -> None:
    lines = list(words_of(result))
    lines += ["", "what to change", *(f"  {line}" for line in advice_lines(advice))]
    show_lines([*lines, "", where_to_look(folder, len(result.ranks))])


def report_profile(folder: Path, *, shows: bool = True) -> None:
    """After a job that has succeeded, whatever is found in its traces."""
    if not (folder / PROFILE_FOLDER).is_dir():
        print_message(
            f"there is no profile in {folder} on this host: rank 0 ran elsewhere, or printed why it profiled no step"
        )
        return
    try:
        result = profile_of(folder)
    except (DrumlineError, OSError) as error:
        print_message(f"the profile could not be analysed: {error}")
        return
    if shows:
        show_profile(result, advise(result), folder)

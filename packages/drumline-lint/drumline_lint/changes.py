"""`--since REV`: the lines that changed since a revision, as `git diff` shows them."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from drumline_lint.errors import UsageError
from drumline_lint.findings import Place
from drumline_lint.linter import Report
from drumline_lint.reading.notebook import line_in_file

_HUNK = re.compile(r"@@ -[\d,]+ \+(?P<first>\d+)(?:,(?P<added>\d+))? @@")
# Whatever the user has set, the output is the same, and no other program is started.
_SETTINGS = "-c core.quotePath=false -c core.fsmonitor=false -c diff.relative=false".split()
_DIFF = (
    "diff --no-ext-diff --no-textconv --no-color --unified=0 --find-renames --ignore-submodules "
    "--src-prefix=a/ --dst-prefix=b/"
)


@dataclass(frozen=True)
class Changes:
    """The changed lines of a repository."""

    top: str
    lines: Mapping[str, Sequence[range]]
    """By the path of the file."""

    def include(self, path: str, first: int, last: int) -> bool:
        """Whether one of these lines changed; of a file outside of the repository, all did."""
        real = os.path.realpath(path)
        if not real.startswith(os.path.join(self.top, "")):  # noqa: PTH118
            return True

        ranges = self.lines.get(real, ())
        return any(changed.start <= last and first < changed.stop for changed in ranges)


def changes_since(revision: str, start: Path) -> Changes:
    """What changed in the repository that `start` is in.

    That is what differs from the commit at which its branch left `revision`, and new files that are
    not ignored.
    """
    top = _top(start if start.is_dir() else start.parent)
    base = _base(top, revision)
    lines = dict(_changed_lines(top, _git(top, *_DIFF.split(), base, "--")))

    new_files = _git(top, "ls-files", "--others", "--exclude-standard", "-z")
    for name in new_files.split("\0"):
        if name:
            lines[str(top / name)] = [range(1, sys.maxsize)]
    return Changes(str(top), lines)


def on_changed_lines(report: Report, changes: Changes) -> Report:
    """The report without findings on lines that did not change."""
    findings = [
        finding for finding in report.findings if _is_changed(report, finding.place, changes)
    ]
    num_unchanged = len(report.findings) - len(findings)
    return replace(report, findings=findings, num_unchanged=num_unchanged)


def _is_changed(report: Report, place: Place, changes: Changes) -> bool:
    """Whether one of the lines of a place changed; of a notebook, in its file."""
    data = report.readings[place.path].data
    first = line_in_file(data, place.cell, place.line)
    last = line_in_file(data, place.cell, place.end_line)
    return changes.include(place.path, first, last)


def _top(folder: Path) -> Path:
    """The folder of the repository."""
    try:
        return Path(_git(folder, "rev-parse", "--show-toplevel").rstrip("\n"))
    except OSError as error:
        raise UsageError(
            f"--since: {folder} is not in a git repository",
            f"git: {error}",
            next_step="leave --since out, or run it in a repository",
        ) from None


def _base(top: Path, revision: str) -> str:
    """The commit at which the branch left the revision; without a common one, the revision."""
    try:
        if revision.startswith("-"):
            raise OSError("a revision does not begin with a hyphen")
        commit = _git(top, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}").strip()
    except OSError:
        raise UsageError(
            f"--since {revision}: {top} has no such revision",
            next_step="give a branch, a tag or a commit; in CI, fetch it first",
        ) from None

    try:
        return _git(top, "merge-base", commit, "HEAD").strip()
    except OSError:
        return commit


def _git(folder: Path, *arguments: str) -> str:
    """What git prints; raises OSError with its message if it fails."""
    try:
        done = subprocess.run(
            ["git", *_SETTINGS, *arguments],  # noqa: S607 - the user's git
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
    except FileNotFoundError:
        raise UsageError(
            "--since needs git, which was not found", next_step="install git"
        ) from None

    if done.returncode:
        raise OSError(done.stderr.decode(errors="replace").strip())
    return os.fsdecode(done.stdout)


def _changed_lines(top: Path, diff: str) -> Iterator[tuple[str, list[range]]]:
    """The lines that a diff adds to each file, by its path.

    They are `range(4, 7)` of train.py for:

        --- a/train.py
        +++ b/train.py
        @@ -3,0 +4,3 @@
    """
    ranges: list[range] = []
    for before, line in itertools.pairwise(diff.split("\n")):
        if line.startswith("+++ ") and before.startswith("--- "):
            ranges = []
            name = line.removeprefix("+++ ").rstrip("\t").removeprefix("b/")
            yield str(top / name), ranges

        elif hunk := _HUNK.match(line):
            first = int(hunk["first"])
            ranges.append(range(first, first + int(hunk["added"] or 1)))

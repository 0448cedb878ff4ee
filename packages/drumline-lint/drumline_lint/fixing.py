"""`--fix` and `--diff`: applies the edits of findings, round by round, and writes the files."""

from __future__ import annotations

import difflib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

from drumline_lint.findings import UNREADABLE, Edit, Finding, column_of, problem, split_lines
from drumline_lint.linter import Report, is_notebook
from drumline_lint.reading.parse import Reading, read_bytes

_LINE_END = re.compile(r"\r\n|\n|\r")


# Text


@dataclass(frozen=True)
class Span:
    """A range of characters, and the text that replaces it.

    `Span(4, 4, "not ")` inserts, `Span(4, 8, "")` deletes.
    """

    start: int
    end: int
    text: str

    def touches(self, span: Span) -> bool:
        """Whether both change the same characters, or insert at the same position."""
        return self.start == span.start or (self.start < span.end and span.start < self.end)


def spans_of(text: str, edits: Iterable[Edit]) -> list[Span]:
    """The same edits in characters of the text, with its line endings.

    Raises ValueError if an edit is outside the text.
    """
    starts = [0, *(line_end.end() for line_end in _LINE_END.finditer(text))]
    lines = split_lines(text)
    newline = line_end[0] if (line_end := _LINE_END.search(text)) else "\n"

    def position(line: int, offset: int) -> int:
        content = lines[line - 1] if 1 <= line <= len(lines) else ""
        num_bytes = len(content.encode(errors="surrogateescape"))
        if not 1 <= line <= len(lines) or not 0 <= offset <= num_bytes:
            raise ValueError(f"there is no line {line} with {offset} bytes")
        return starts[line - 1] + column_of(content, offset) - 1

    spans = []
    for edit in edits:
        start = position(*edit.start)
        end = position(*edit.end)
        if end < start:
            raise ValueError("an edit ends before it begins")
        spans.append(Span(start, end, edit.text.replace("\n", newline)))
    return spans


def apply_spans(text: str, spans: Sequence[Span]) -> str:
    """The text with these spans replaced, which must not touch each other."""
    for span in sorted(spans, key=lambda span: span.start, reverse=True):
        text = text[: span.start] + span.text + text[span.end :]
    return text


# All files

MOST_ROUNDS = 10
"""The most rounds of edits: some edits may undo each other forever."""
Check = Callable[[Sequence[Reading]], Report]


@dataclass
class Fixed:
    """Files as they were and as they would be."""

    before: dict[Path, Reading]
    """All files."""
    after: dict[Path, Reading]
    """The files that change."""
    counts: Counter[Path]
    """How many findings were fixed in each file."""
    report: Report
    """The report of the changed files."""

    @property
    def in_notebooks(self) -> int:
        """Findings with a fix that was not applied because notebooks are not written."""
        return sum(
            bool(finding.edits) and is_notebook(self.report.readings, finding)
            for finding in self.report.findings
        )


def fix(readings: Sequence[Reading], check: Check) -> Fixed:
    """Apply edits until no finding has one. In memory: nothing is written."""
    before = {reading.path: reading for reading in readings}
    now = dict(before)
    counts: Counter[Path] = Counter()
    report = check(readings)

    for _ in range(MOST_ROUNDS):
        applied: Counter[Path] = Counter()
        for path in now:
            now[path], num_applied = _fixed_file(now[path], report.findings)
            if num_applied:
                applied[path] = num_applied
        if not applied:
            break

        counts += applied
        report = check(list(now.values()))

    report.fixed = counts.total()
    return Fixed(before, {path: now[path] for path in counts}, counts, report)


def diff_of(fixed: Fixed) -> str:
    """A unified diff of all files, for `git apply` and `patch -p1`."""
    return "".join(
        "".join(_diff(_called(path), fixed.before[path], fixed.after[path]))
        for path in sorted(fixed.after)
    )


def write(fixed: Fixed, check: Check, outside: Set[Path] = frozenset()) -> Report:
    """Replace each file atomically; a file that could not be written is reported, with its
    findings.

    `outside`: files that are not written, because a link from a given folder leads to them.
    """
    problems = []
    for path in list(fixed.after):
        try:
            if path in outside:
                raise OSError(
                    f"a link leads out of the folder, to {path.resolve()}; give that path to fix it"
                )
            _write_whole(path, fixed.before[path].data, fixed.after[path].data)
        except OSError as error:
            message = f"the file was not fixed: {error.strerror or error}"
            problems.append(problem(UNREADABLE, path, message, fix="allow writing, or use --diff"))
            del fixed.after[path], fixed.counts[path]

    if not problems:
        return fixed.report

    report = check(list({**fixed.before, **fixed.after}.values()))
    return replace(
        report,
        problems=[*report.problems, *problems],
        fixed=fixed.counts.total(),
        unwritten=frozenset(finding.place.path for finding in problems),
    )


# One file


def _fixed_file(reading: Reading, findings: Sequence[Finding]) -> tuple[Reading, int]:
    """Apply all edits that do not touch each other and leave a file that can be parsed.

    Returns the new file, and how many findings were fixed.
    """
    if reading.content is None or reading.path.suffix == ".ipynb":
        return reading, 0

    groups = list(_apart(_text(reading), findings, str(reading.path)))
    if not groups:
        return reading, 0

    mended = _applied(reading, groups)
    if mended is not None:
        return mended, len(groups)

    # One of them breaks the file: try each in addition to those that did not.
    fine: list[list[Span]] = []
    for group in groups:
        if _applied(reading, [*fine, group]) is not None:
            fine.append(group)

    mended = _applied(reading, fine) if fine else None
    return (reading, 0) if mended is None else (mended, len(fine))


def _apart(text: str, findings: Sequence[Finding], path: str) -> Iterator[list[Span]]:
    """The edits of each finding, without findings whose edits touch those of one before."""
    taken: list[Span] = []
    for finding in findings:
        if finding.place.path != path or not finding.edits:
            continue

        try:
            spans = spans_of(text, finding.edits)
        except ValueError:  # the edit does not fit this text
            continue

        if not any(span.touches(taken_span) for span in spans for taken_span in taken):
            taken += spans
            yield spans


def _applied(reading: Reading, groups: Sequence[Sequence[Span]]) -> Reading | None:
    """The file with all these edits; None if it is the same, or cannot be encoded or parsed."""
    text = apply_spans(_text(reading), [span for group in groups for span in group])
    try:
        data = text.encode(reading.encoding, errors=_errors(reading))
    except UnicodeEncodeError:
        return None

    mended = read_bytes(reading.path, data)
    if mended.problems or mended.content is None or data == reading.data:
        return None
    return mended


def _text(reading: Reading) -> str:
    return reading.data.decode(reading.encoding, errors=_errors(reading))


def _errors(reading: Reading) -> str:
    """As it was read: only scripts may have bytes that are not valid text."""
    return "surrogateescape" if reading.encoding.startswith("utf-8") else "strict"


# The diff


def _called(path: Path) -> str:
    """The path relative to the current folder if it is below it, as `git apply` needs; otherwise
    absolute, without the slash before it."""
    here = Path.cwd()
    relative = path.relative_to(here) if path.is_relative_to(here) else path
    return relative.as_posix().lstrip("/")


def _diff(path: str, before: Reading, after: Reading) -> Iterator[str]:
    """The lines of the diff of one file.

    For example:

        --- a/launch.sh
        +++ b/launch.sh
        @@ -1 +1 @@
        -python -m torch.distributed.launch --use-env train.py
        +python -m torch.distributed.run train.py
    """
    for line in difflib.unified_diff(_lines(before), _lines(after), f"a/{path}", f"b/{path}"):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _lines(reading: Reading) -> list[str]:
    """Lines as `patch` counts them: a form feed does not end a line, and a byte order mark is part
    of the first."""
    mark = "\ufeff" if reading.encoding == "utf-8-sig" else ""
    *lines, last = f"{mark}{_text(reading)}".split("\n")
    return [*(f"{line}\n" for line in lines), *([last] if last else [])]


# Writing


def _write_whole(path: Path, expected: bytes, data: bytes) -> None:
    """A reader sees the old file or the new one. A link stays a link, and the mode is kept."""
    import tempfile

    target = path.resolve()
    if target.read_bytes() != expected:
        raise OSError("it was changed in the meantime")
    if not os.access(target, os.W_OK):
        raise PermissionError("it is read-only")

    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    draft = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)

        draft.chmod(target.stat().st_mode & 0o7777)
        draft.replace(target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise

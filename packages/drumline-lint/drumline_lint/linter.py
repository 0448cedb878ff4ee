"""Reads files, runs every selected rule on them, and drops what is silenced or not shown."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import traceback
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from drumline_lint.findings import (
    OWN_RULES,
    RULE_FAILED,
    UNREADABLE,
    Finding,
    Place,
    Rule,
    Severity,
    problem,
    split_lines,
)
from drumline_lint.flow.distributed import (
    distributed_sources,
    projects,
    speaks_of_ranks,
)
from drumline_lint.levels import (
    Evidence,
    copied_libraries,
    evidence_of,
    is_set_aside,
    limited,
    why_not_run,
)
from drumline_lint.parallel_work import in_processes
from drumline_lint.program.files import index_of
from drumline_lint.program.program import Program
from drumline_lint.reading.launchers import (
    Launch,
    launches,
    training_file,
    working_folder,
)
from drumline_lint.reading.manifest import Manifest
from drumline_lint.reading.mentions import mentioned_files
from drumline_lint.reading.parse import Reading, decode, read_file
from drumline_lint.reading.shell import Script
from drumline_lint.reading.source import CANNOT_PARSE, Source, is_silenced, syntax_problem
from drumline_lint.settings import Settings

RuleModules = Mapping[str, Any]
"""By number. Each has RULE, and `check(program, source)` or `check_shell(script)`."""
Progress = Callable[[str, int, int], None]
FEW_FILES = 100
"""So few are not worth a process."""


def no_progress(doing: str, number: int, count: int) -> None:
    """Where nobody watches."""


@dataclass
class Report:
    """The result of checking all files."""

    findings: list[Finding]
    """The findings that are shown, in the order of their places."""
    hidden: list[Finding]
    """Findings below the severity that is shown."""
    problems: list[Finding]
    """Files that could not be read, and rules that failed."""
    readings: Mapping[str, Reading]
    fixed: int = 0
    unwritten: frozenset[str] = frozenset()
    """Files that could be read, but not fixed."""
    num_known: int = 0
    """Findings that are not shown because the baseline has them."""
    num_unchanged: int = 0
    """Findings that are not shown because their lines did not change."""

    @property
    def fixable(self) -> int:
        """How many of the shown findings `--fix` could fix."""
        return sum(
            bool(finding.edits) and not is_notebook(self.readings, finding)
            for finding in self.findings
        )

    @property
    def files_read(self) -> int:
        return sum(
            (reading.content is not None or not reading.problems) and not reading.is_skipped
            for reading in self.readings.values()
        )

    @property
    def is_clean(self) -> bool:
        return all(finding.severity is Severity.NOTE for finding in self.findings)

    @property
    def is_complete(self) -> bool:
        """Whether all files were read; what only a newer Python can read does not count."""
        return all(problem.severity is Severity.NOTE for problem in self.problems)

    @property
    def everything(self) -> list[Finding]:
        return sorted([*self.findings, *self.problems], key=_order)

    def line(self, place: Place) -> str | None:
        reading = self.readings.get(place.path)
        if reading is None:
            return None
        content = reading.content
        if content is None and reading.path.suffix == ".ipynb":
            return None
        text = reading.data.decode(errors="replace") if content is None else content.text
        lines = split_lines(text)
        number = place.line if content is None else _line_of_text(content, place, place.line)
        return lines[number - 1] if 0 < number <= len(lines) else None


@dataclass
class Results:
    """What the rules found, before anything is silenced or left out."""

    findings: list[Finding] = field(default_factory=list)
    problems: list[Finding] = field(default_factory=list)
    """Rules that failed, and files that cannot be parsed."""
    unparsed: list[str] = field(default_factory=list)
    """The paths of those files."""

    def extend(self, results: Results) -> None:
        self.findings += results.findings
        self.problems += results.problems
        self.unparsed += results.unparsed


@dataclass(frozen=True)
class TextsOfRepository:
    """What the files beside the Python code say of it."""

    launches: Mapping[Path, Sequence[Launch]]
    documents: Mapping[Path, str]
    mentioned: frozenset[str]


def all_docs(rules: RuleModules) -> dict[str, Rule]:
    return {**OWN_RULES, **{number: module.RULE for number, module in rules.items()}}


def read_all(files: Sequence[Path], *, stdin: tuple[Path, bytes] | None = None) -> list[Reading]:
    """Each file, and the standard input under its given name. Python is not parsed yet."""
    from_stdin = [] if stdin is None else [decode(*stdin)]
    return from_stdin + [read_file(path) for path in files]


def check(
    readings: Sequence[Reading],
    rules: RuleModules,
    settings: Settings,
    *,
    problems: Sequence[Finding] = (),
    progress: Progress = no_progress,
) -> Report:
    """Run every selected rule; `problems`: those found before."""
    return sift(readings, run_rules(readings, rules, settings, progress), settings, problems)


def run_rules(
    readings: Sequence[Reading],
    rules: RuleModules,
    settings: Settings,
    progress: Progress = no_progress,
    *,
    jobs: int = 1,
) -> Results:
    """`jobs`: how many processes to use at most. Files that import each other are parsed and checked
    in one."""
    chosen = {number: module for number, module in rules.items() if number in settings.chosen}
    scripts = [script for reading in readings for script in reading.scripts]
    sources = [reading.content for reading in readings if isinstance(reading.content, Source)]
    readmes = [reading.readme for reading in readings if reading.readme is not None]
    documents = documents_by_path(readings)
    launched = launches_by_file([*scripts, *readmes], documents)
    texts = TextsOfRepository(launched, documents, mentioned_files(readings))
    check_part = functools.partial(_check_part, chosen, progress, texts, os.getpid())
    results = Results()
    for part in in_processes(check_part, _parts_of(projects(sources), jobs)):
        results.extend(part)
    _check_scripts(results, scripts, chosen)
    copies = copied_libraries([reading.path for reading in readings])
    results.findings = [_as_of_copy(finding, copies) for finding in results.findings]
    return results


def _as_of_copy(finding: Finding, copies: Sequence[Path]) -> Finding:
    """The examples and tools of a library are not run for having a copy of it."""
    path = Path(finding.place.path)
    is_copied = any(path.is_relative_to(copy) for copy in copies)
    return replace(finding, severity=Severity.NOTE) if is_copied else finding


def sift(
    readings: Sequence[Reading],
    results: Results,
    settings: Settings,
    problems: Sequence[Finding] = (),
) -> Report:
    """What is not silenced, and what of that is shown."""
    by_path = {str(reading.path): reading for reading in readings}
    for path in results.unparsed:
        by_path[path].content = None
        by_path[path].is_skipped = True
    unread = [finding for reading in readings for finding in reading.problems]
    findings = sorted(
        (
            finding
            for finding in dict.fromkeys(results.findings)
            if settings.is_wanted(finding) and not _asks_for_silence(finding, by_path)
        ),
        key=_order,
    )
    every_problem = sorted(dict.fromkeys([*problems, *unread, *results.problems]), key=_order)
    return Report(
        findings=[finding for finding in findings if settings.is_shown(finding)],
        hidden=[finding for finding in findings if not settings.is_shown(finding)],
        problems=[finding for finding in every_problem if settings.is_wanted(finding)],
        readings=by_path,
    )


def is_notebook(readings: Mapping[str, Reading], finding: Finding) -> bool:
    """Whether it was found in a notebook, whose text is not the text of the file."""
    reading = readings.get(finding.place.path)
    return (
        reading is not None and isinstance(reading.content, Source) and reading.content.is_notebook
    )


# Running rules


def _parts_of(groups: Sequence[list[Source]], jobs: int) -> list[list[list[Source]]]:
    """The projects for each process: the largest first, to the least loaded."""
    most = min(jobs, len(groups), sum(map(len, groups)) // FEW_FILES)
    parts: list[list[list[Source]]] = [[] for _ in range(max(1, most))]
    loads = [0] * len(parts)
    for group in sorted(groups, key=_size, reverse=True):
        lightest = loads.index(min(loads))
        parts[lightest].append(group)
        loads[lightest] += _size(group)
    return parts


def _size(group: Sequence[Source]) -> int:
    return sum(len(source.text) for source in group)


def _check_part(
    rules: RuleModules,
    progress: Progress,
    texts: TextsOfRepository,
    first_process: int,
    part: Sequence[list[Source]],
) -> Results:
    """The results of some projects. Only the first process shows its progress."""
    results = Results()
    if os.getpid() != first_process:
        progress = no_progress
    num_files = sum(map(len, part))
    numbers = itertools.count(1)
    projects_read = []
    for project in part:
        parsed = []
        for source in project:
            progress("reading", next(numbers), num_files)
            if _is_parsed(results, source):
                parsed.append(source)
        projects_read.append(parsed)
    numbers = itertools.count(1 + len(results.unparsed))
    for project in projects_read:
        for _ in _check_project(results, project, rules, texts):
            progress("looking at", next(numbers), num_files)
    return results


def _is_parsed(results: Results, source: Source) -> bool:
    """Whether its tree could be read; what cannot be is a problem of the file."""
    try:
        _ = source.tree
    except CANNOT_PARSE as error:
        results.problems.append(syntax_problem(error, source.path))
        results.unparsed.append(str(source.path))
        return False
    with contextlib.suppress(Exception):  # a file that cannot be analyzed is reported later
        index_of(source)  # now: the tree that it replaces takes more memory
    return True


def _check_project(
    results: Results,
    project: list[Source],
    rules: RuleModules,
    texts: TextsOfRepository,
) -> Iterator[Source]:
    """Yields each file before it is checked."""
    applicable = {number: module for number, module in rules.items() if hasattr(module, "check")}
    if not any(map(speaks_of_ranks, project)):
        applicable = {
            number: module
            for number, module in applicable.items()
            if not module.RULE.only_distributed
        }
    program, distributed = _resolved(results, project)
    program.launches = texts.launches
    program.documents = texts.documents
    program.mentioned = texts.mentioned
    for source in program.sources:
        yield source
        for number, module in applicable.items():
            if source in distributed or not module.RULE.only_distributed:
                find = functools.partial(findings_of, module, program, source)
                _run_rule(results, number, source.path, find)


def documents_by_path(readings: Sequence[Reading]) -> Mapping[Path, str]:
    return {
        Path(os.path.normpath(reading.path)): reading.document
        for reading in readings
        if reading.document is not None
    }


def launches_by_file(
    scripts: list[Script], documents: Mapping[Path, str]
) -> Mapping[Path, Sequence[Launch]]:
    """The launches of all scripts, which get the settings that they may name, by the Python file
    that they start, from the folder that the script is in or enters, or one above."""
    launched: dict[Path, list[Launch]] = {}
    for script in scripts:
        script.documents = documents
        for launch in launches(script):
            name = training_file(launch)
            names = {name, f"{working_folder(launch)}/{name}".lstrip("/")} if name else ()
            paths = {folder / each for folder in script.path.parents for each in names}
            for path in {Path(os.path.normpath(path)) for path in paths}:
                launched.setdefault(path, []).append(launch)
    return launched


def findings_of(module: Any, program: Program, source: Source) -> Iterator[Finding]:
    """The findings of a rule in a file. In a test, and in code that nothing runs, they are notes;
    elsewhere they are what their evidence allows."""
    if source.is_test and not module.RULE.in_tests:
        return
    for finding in module.check(program, source):
        reason = why_not_run(program, source, finding)
        if reason is None:
            yield limited(finding, module.RULE, evidence_of(program, source))
        else:
            message = f"{finding.message} (a note: {reason})" if reason else finding.message
            yield replace(finding, severity=Severity.NOTE, message=message)


def findings_of_script(module: Any, script: Script) -> Iterator[Finding]:
    """A script says itself how many processes it starts."""
    for finding in module.check_shell(script):
        yield limited(finding, module.RULE, Evidence.COMPLETE)


def _check_scripts(results: Results, scripts: list[Script], rules: RuleModules) -> None:
    for script in scripts:
        for number, module in rules.items():
            if hasattr(module, "check_shell"):
                find = functools.partial(findings_of_script, module, script)
                _run_rule(results, number, script.path, find)


def _run_rule(
    results: Results, number: str, path: Path, question: Callable[[], Iterator[Finding]]
) -> None:
    is_old = is_set_aside(path)
    try:
        results.findings += (
            replace(finding, severity=Severity.NOTE) if is_old else finding
            for finding in question()
        )
    except Exception as error:
        results.problems.append(_failure(error, path, f"rule {number}"))


def _resolved(results: Results, sources: list[Source]) -> tuple[Program, Set[Source]]:
    """The program of all files, and which of them are distributed; a file that cannot be analyzed
    is reported and left out."""
    try:
        return _program_of(sources)
    except Exception as error:
        failure = _failure(error, sources[0].path, "the reading of names")
        if len(sources) == 1:
            results.problems.append(failure)
            return _program_of([])
    fine = [source for source in sources if _resolved(results, [source])[0].sources]
    if len(fine) < len(sources):
        return _resolved(results, fine)
    results.problems.append(failure)  # only together they cannot be analyzed
    return _program_of([])


def _program_of(sources: list[Source]) -> tuple[Program, Set[Source]]:
    program = Program(sources)
    return program, distributed_sources(program)


def _failure(error: Exception, path: Path, who: str) -> Finding:
    if isinstance(error, RecursionError):
        message = f"the code is nested too deeply for {who}"
        return problem(UNREADABLE, path, message)
    where = traceback.extract_tb(error.__traceback__)[-1]
    message = f"{who} failed on this file, which is a bug of drumline-lint: {type(error).__name__}: {error}"
    return problem(
        RULE_FAILED, path, f"{message} ({Path(where.filename).name}, line {where.lineno})"
    )


# Filtering


def _asks_for_silence(finding: Finding, readings: Mapping[str, Reading]) -> bool:
    reading = readings.get(finding.place.path)
    content = None if reading is None else reading.content
    if content is None or not content.silenced:
        return False
    place = finding.place
    first, last = (_line_of_text(content, place, line) for line in (place.line, place.end_line))
    return is_silenced(content.silenced, finding.rule, finding.name, (first, last))


def _line_of_text(content: Source | Script | Manifest, place: Place, line: int) -> int:
    """Convert a line within a notebook's cell to a line of the text of all cells."""
    if place.cell is None or not isinstance(content, Source) or not content.cells:
        return line
    index = bisect_right(content.cells, place.cell, key=lambda cell: cell.number) - 1
    return content.cells[index].first_line + line - 1


def _order(finding: Finding) -> tuple[str, int, int, int, str, str]:
    place = finding.place
    return place.path, place.cell or 0, place.line, place.column, finding.rule, finding.message

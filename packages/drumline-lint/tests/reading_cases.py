"""The cases of `cases/*.md`: what they say, and what the rules find in them."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from drumline_lint.findings import Finding
from drumline_lint.flow.distributed import distributed_sources
from drumline_lint.linter import (
    documents_by_path,
    findings_of,
    findings_of_script,
    launches_by_file,
)
from drumline_lint.program.program import Program
from drumline_lint.reading.mentions import mentioned_files
from drumline_lint.reading.parse import read_bytes
from drumline_lint.reading.source import Source
from drumline_lint.rules import all_rules

CASES = Path(__file__).parent / "cases"
NAMES = {"python": "case.py", "sh": "case.sh", "yaml": "case.yaml", "dockerfile": "Dockerfile"}
_HEADING = re.compile(r"^## (?P<kind>bad|good): (?P<title>.*)$", re.MULTILINE)
_BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"\A# file: (?P<name>\S+)\n")
_MARK = re.compile(r"# <- (?P<rules>[A-Z0-9, ]+)$")
_LINES = re.compile(r"\(lines? (?P<numbers>[0-9, ]+)\)")


@dataclass(frozen=True)
class Case:
    """Some files, and the lines of them that a rule must report."""

    rule: str
    kind: str
    title: str
    files: tuple[tuple[str, str], ...]
    expected: frozenset[tuple[str, int]]

    def __str__(self) -> str:
        return f"{self.rule}-{self.kind}-{self.title.replace(' ', '-')}"


def read_cases(rule: str, text: str) -> list[Case]:
    """All of one rule's."""
    parts = _HEADING.split(text)[1:]
    return [_case(rule, *parts[number : number + 3]) for number in range(0, len(parts), 3)]


def findings_in(files: tuple[tuple[str, str], ...]) -> list[Finding]:
    """What all rules say of some files."""
    python = [(name, text) for name, text in files if name.endswith(".py")]
    program = Program([Source(Path(name), text, ast.parse(text)) for name, text in python])
    distributed = distributed_sources(program)
    readings = [
        read_bytes(Path(name), text.encode(errors="surrogateescape"))
        for name, text in files
        if not name.endswith(".py")
    ]
    scripts = [script for reading in readings for script in reading.scripts]
    readmes = [reading.readme for reading in readings if reading.readme is not None]
    program.documents = documents_by_path(readings)
    program.launches = launches_by_file([*scripts, *readmes], program.documents)
    program.mentioned = mentioned_files(readings)
    found: list[Finding] = []
    for module in all_rules().values():
        if hasattr(module, "check"):
            for source in program.sources:
                if source in distributed or not module.RULE.only_distributed:
                    found += findings_of(module, program, source)
        if hasattr(module, "check_shell"):
            for script in scripts:
                found += findings_of_script(module, script)
    return found


def files_of(name: str, snippet: str) -> tuple[tuple[str, str], ...]:
    """The files of an example, which begin with `# file: NAME` if there are several."""
    parts = re.split(r"^# file: (\S+)\n", snippet, flags=re.MULTILINE)
    return tuple(zip(parts[1::2], parts[2::2], strict=True)) or ((name, snippet),)


def lines_of(rule: str, findings: list[Finding]) -> set[tuple[str, int]]:
    """Where one rule found something."""
    return {(one.place.path, one.place.line) for one in findings if one.rule == rule}


def _case(rule: str, kind: str, title: str, body: str) -> Case:
    files = []
    expected = set()
    for block in _BLOCK.finditer(body):
        text = block["text"]
        named = _FILE.match(text)
        name = named["name"] if named else NAMES[block["language"]]
        files.append((name, text))
        for number, line in enumerate(text.splitlines(), start=1):
            mark = _MARK.search(line)
            if mark and rule in re.split(r"[, ]+", mark["rules"]):
                expected.add((name, number))
    if told := _LINES.search(title):
        expected |= {(files[0][0], int(number)) for number in told["numbers"].split(",")}
    assert files, f"{rule}: {title!r} has no code"
    return Case(rule, kind, title, tuple(files), frozenset(expected))

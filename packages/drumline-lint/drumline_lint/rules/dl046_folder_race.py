"""DL046: every rank deletes or creates the same folder."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.conditions import conditions
from drumline_lint.flow.guards import is_on_every_rank
from drumline_lint.flow.paths import how_every_rank_gets_there
from drumline_lint.program.calls import argument, has_unknown_arguments
from drumline_lint.program.imports import calls_near
from drumline_lint.program.names import INIT
from drumline_lint.program.origins import parts
from drumline_lint.program.program import Program
from drumline_lint.program.tree import ancestors, last_name
from drumline_lint.reading.source import Source
from drumline_lint.training.saves import is_own, severity_of_race

RULE = rule("DL046", in_tests=False)
_DELETING = ("shutil.rmtree", "shutil.move", "os.remove", "os.unlink", "os.rename")
_CREATING = ("os.makedirs", "os.mkdir", "pathlib.Path.mkdir")
_TIMES = re.compile("%[HIMSXcTs]")
_STAMPS = ("strftime", "now", "time")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Deletions, and creations that may find the folder, that all ranks make at the same path."""
    for call in program.calls(source, *_DELETING):
        if _is_race(program, call):
            message = (
                f"{source.code(call.func)} runs on every rank{_how(program, call).rstrip(',')}: "
                "one deletes what another has written or is about to read"
            )
            yield RULE.at(source, call, message, severity=severity_of_race(program, call))
    for call in _creations(program, source):
        if argument(call, 2, "exist_ok") is None and _is_race(program, call):
            message = (
                f"every rank{_how(program, call)} creates the folder, also after another has: "
                "that raises a FileExistsError"
            )
            is_harmless = _is_made_by_scripts(program, source) or _is_optional(program, source)
            severity = Severity.NOTE if is_harmless else severity_of_race(program, call)
            yield RULE.at(source, call, message, severity=severity)
        elif _has_clock(program, _path(call)) and _is_race(program, call):
            message = (
                f"{source.code(call.func)} names the folder by this rank's clock: "
                "ranks may use different folders"
            )
            yield RULE.at(source, call, message, severity=severity_of_race(program, call))


def _is_made_by_scripts(program: Program, source: Source) -> bool:
    """Whether all scripts that start it create a folder themselves."""
    started = program.launches_of(source)
    return bool(started) and all("mkdir" in launch.script.text for launch in started)


def _is_optional(program: Program, source: Source) -> bool:
    """Whether a group is only begun where it is asked for: mostly one process creates it."""
    inits = calls_near(program, source, INIT)
    return bool(inits) and all(any(conditions(program, init)) for init in inits)


def _how(program: Program, call: ast.Call) -> str:
    how = how_every_rank_gets_there(program, call)
    return f", {how}," if how else ""


def _path(call: ast.Call) -> ast.expr | None:
    return call.args[0] if call.args else getattr(call.func, "value", None)


def _has_clock(program: Program, path: ast.expr | None) -> bool:
    calls = [part for part in parts(program, path) if isinstance(part, ast.Call)]
    names = [last_name(part.func) for part in calls if not _is_of_day(part)]
    is_sent = path is not None and "broadcast" in program.source_of(path).text
    return not is_sent and not set(names).isdisjoint(_STAMPS)


def _is_of_day(clock: ast.Call) -> bool:
    """`strftime("%Y-%m-%d")` is the same on all ranks, but for one moment of the day."""
    formats = [str(part.value) for part in clock.args if isinstance(part, ast.Constant)]
    texts = [text for text in formats if "%" in text]
    return any("%d" in text and not _TIMES.search(text) for text in texts)


def _creations(program: Program, source: Source) -> Iterator[ast.Call]:
    for name in ("makedirs", "mkdir"):
        for call in program.index(source).calls.get(name, ()):
            is_known = program.name_of(call.func) in _CREATING
            is_path = not program.values(call.func) and not call.args
            if (is_known or is_path) and not has_unknown_arguments(call):
                yield call


def _is_race(program: Program, call: ast.Call) -> bool:
    if any(isinstance(outer, ast.Try) for outer in ancestors(call)):
        return False
    return is_on_every_rank(program, call) and not is_own(program, _path(call))

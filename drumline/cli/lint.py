"""`drumline lint PATH...`: the mistakes of distributed training in any code, told before the job starts."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NoReturn

from drumline.errors import ExitCode, UsageError, did_you_mean
from drumline.lint.finding import Severity
from drumline.lint.reading.files import find_files
from drumline.lint.reading.parse import Reading
from drumline.lint.rule import Rule
from drumline.lint.rules import all_rules
from drumline.lint.run import Report, all_docs, check, exit_is_clean, read_all
from drumline.lint.selection import find_rule, split_words
from drumline.lint.settings import Settings, Wishes, make_settings
from drumline.lint.telling.closing import counted
from drumline.lint.telling.rules import as_explanation, as_list
from drumline.terminal import print_message, show, show_progress

HELP = """\
usage: drumline lint PATH [PATH ...] [flags]

Reads training code, yours or anyone's, and tells which mistakes of distributed
training are in it: where, why it bites, and what to write instead. Python,
notebooks, shell and sbatch scripts. Nothing that it reads is run or imported.

  drumline lint train.py launch.sbatch       these files
  drumline lint .                            all files in this folder
  drumline lint . --severity note            what may be as meant, too
  drumline lint . --select DL012,unguarded-save
  drumline lint . --fix --diff               mend the mechanical, show it
  drumline lint --explain DL012              one rule: why, bad, good
  cat train.py | drumline lint - --stdin-filename train.py

what is told
  --select RULES        only these: numbers, their beginnings (DL1), or names
  --ignore RULES        all but these
  --severity LEVEL      from which level on: note | warning | error  [warning]
  --exclude GLOB        leave out files and folders; may be given again
  --no-config           do not look for [tool.drumline.lint] in pyproject.toml
  --stdin-filename F    what to call the text that `-` reads

how it is told
  --format FORMAT       text | json | sarif | github  [text]
  --output FILE         write it there
  --statistics          how often each rule was met, not where
  --exit-zero           findings do not fail

mending
  --fix                 apply the fixes that are mechanical
  --diff                show them; without --fix, nothing is written

the rules
  --list                all of them, a line each
  --explain RULE        one of them, with wrong code and right code
  --help                this text

`# noqa: DL012` on a line silences a rule there, `# noqa` all of them.

exit codes: 0 no error and no warning (notes never fail), 1 there are some,
            2 wrong usage, or a file that could not be read
"""
MANY_FILES = 50
FORMATS = ("text", "json", "sarif", "github")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, next_step="see drumline lint --help")


def run(argv: Sequence[str]) -> int:
    """The verb."""
    given = _flags(argv)
    if given.help:
        return _print(HELP)
    rules = all_rules()
    docs = all_docs(rules)
    if given.list:
        return _print(as_list(docs.values()))
    if given.explain is not None:
        return _print(as_explanation(find_rule(given.explain, docs, where="--explain")))
    _refuse_contradictions(given)
    collected = gc.isenabled()
    gc.disable()  # trees of a thousand files are looked through again and again, and nothing in them is ever free
    try:
        return _lint(given, rules, docs)
    finally:
        gc.freeze()  # nor are they to be taken apart, one by one, when the command ends
        if collected:
            gc.enable()


def _flags(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="drumline lint", add_help=False, allow_abbrev=False)
    parser.add_argument("paths", nargs="*")
    for name in ("--select", "--ignore", "--exclude"):
        parser.add_argument(name, action="append", default=[])
    for name in ("--explain", "--output", "--stdin-filename", "--severity", "--format"):
        parser.add_argument(name)
    for name in ("--fix", "--diff", "--statistics", "--list", "--exit-zero", "--no-config"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--help", "-h", action="store_true")
    given, unknown = parser.parse_known_intermixed_args(list(argv))
    if unknown:
        known = [name for action in parser._actions for name in action.option_strings]
        flag = unknown[0].partition("=")[0]
        meant = did_you_mean(flag, known)
        raise UsageError(
            f"drumline lint has no flag {flag}" + (f"; {meant}" if meant.startswith("did") else ""),
            next_step="see drumline lint --help",
        )
    return given


def _refuse_contradictions(given: argparse.Namespace) -> None:
    if not given.paths:
        raise UsageError("no PATH was given", next_step="give files or folders, as in: drumline lint .")
    for flag, known in (("format", FORMATS), ("severity", [*map(str, Severity)])):
        value = getattr(given, flag)
        if value is not None and value not in known:
            raise UsageError(f"--{flag} {value}: there is no such {flag}; {did_you_mean(value, known)}")
    has_stdin = "-" in given.paths
    if given.stdin_filename is not None and not has_stdin:
        raise UsageError("--stdin-filename belongs to the path -", next_step="give - as a path")
    if given.fix and has_stdin:
        raise UsageError("what comes from the standard input cannot be fixed", next_step="use --diff")
    if given.statistics and given.format not in (None, "text"):
        raise UsageError(
            "--statistics are text", next_step="leave one out; --format json has them in summary.by_rule"
        )
    if given.diff and given.format in ("json", "sarif") and given.output is None:
        raise UsageError(
            f"--diff and --format {given.format} would both be on the standard output",
            next_step="give --output FILE for the report",
        )


def _lint(given: argparse.Namespace, rules: Mapping[str, Any], docs: Mapping[str, Rule]) -> int:
    settings = _settings(given, docs)
    found = find_files(
        [Path(path) for path in given.paths if path != "-"], exclude=settings.exclude, root=settings.root
    )
    progress = _show_progress if sys.stderr.isatty() and len(found.files) >= MANY_FILES else None
    readings = read_all(found.files, progress, stdin=_stdin(given))

    def checked(readings: Sequence[Reading]) -> Report:
        return check(readings, rules, settings, problems=found.problems, progress=progress)

    report = _mend(given, readings, checked, found.outside) if given.fix or given.diff else checked(readings)
    _tell(given, report, docs)
    if report.problems:
        return ExitCode.USAGE
    return ExitCode.SUCCESS if given.exit_zero or exit_is_clean(report) else ExitCode.SOMETHING_WRONG


def _settings(given: argparse.Namespace, docs: Mapping[str, Rule]) -> Settings:
    flags = Wishes(
        select=split_words(given.select),
        ignore=split_words(given.ignore),
        exclude=given.exclude,
        severity=None if given.severity is None else Severity(given.severity),
    )
    first = given.stdin_filename or "." if given.paths[0] == "-" else given.paths[0]
    return make_settings(flags, docs, start=Path(first), use_file=not given.no_config)


def _stdin(given: argparse.Namespace) -> tuple[Path, bytes] | None:
    if "-" not in given.paths:
        return None
    return Path(given.stdin_filename or "<stdin>"), sys.stdin.buffer.read()


def _mend(
    given: argparse.Namespace,
    readings: Sequence[Reading],
    checked: Callable[[Sequence[Reading]], Report],
    outside: Set[Path],
) -> Report:
    """What is left to tell: of the files as they are now, or as they stay where nothing is written."""
    from drumline.lint.fixing import diff_of, fix, write

    fixed = fix(readings, checked)
    if given.diff:
        _print(diff_of(fixed))
    if fixed.in_notebooks:
        places = counted(fixed.in_notebooks, "place")
        print_message(
            f"{places} in notebooks could be fixed, but notebooks are not written: mend them by hand"
        )
    return write(fixed, checked, outside) if given.fix else checked(readings)


def _tell(given: argparse.Namespace, report: Report, docs: Mapping[str, Rule]) -> None:
    text = _told(given, report, docs)
    if given.output is None:
        _print(text, is_painted=_is_painted(given))
        return
    try:
        Path(given.output).write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UsageError(f"--output {given.output} cannot be written: {error.strerror}") from None


def _told(given: argparse.Namespace, report: Report, docs: Mapping[str, Rule]) -> str:
    if given.format == "json":
        from drumline.lint.telling.json import as_json

        return as_json(report)
    if given.format == "sarif":
        from importlib.metadata import version

        from drumline.lint.telling.sarif import as_sarif

        return as_sarif(report, docs, version=version("drumline"), folder=Path.cwd())
    if given.format == "github":
        from drumline.lint.telling.github import as_github

        return as_github(report)
    from drumline.lint.telling.text import as_statistics, as_text

    colour = _is_painted(given)
    return as_statistics(report, docs, colour=colour) if given.statistics else as_text(report, colour=colour)


# The terminal


def _is_painted(given: argparse.Namespace) -> bool:
    is_text = given.format in (None, "text") and given.output is None
    return is_text and sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _print(text: str, *, is_painted: bool = False) -> int:
    show(text, end="", is_painted=is_painted, is_data=not is_painted)
    return ExitCode.SUCCESS


def _show_progress(doing: str, number: int, count: int) -> None:
    """On one line, which is cleared in the end."""
    if number % 10 == 0 or number == count:
        text = f"{doing} file {number:,} of {count:,}" if number < count else ""
        show_progress(text)

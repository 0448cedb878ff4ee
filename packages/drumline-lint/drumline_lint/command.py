"""The command `drumline-lint PATH...`, which is `drumline lint`, too: flags, settings, output and
exit codes."""

from __future__ import annotations

import argparse
import gc
import io
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from drumline_lint import __version__
from drumline_lint.errors import ExitCode, UsageError, did_you_mean
from drumline_lint.findings import Rule, Severity
from drumline_lint.linter import (
    Progress,
    Report,
    Results,
    all_docs,
    check,
    no_progress,
    read_all,
    run_rules,
    sift,
)
from drumline_lint.output.text import as_explanation, as_list, as_statistics, as_text, plural
from drumline_lint.reading.discovery import find_files
from drumline_lint.reading.parse import Reading
from drumline_lint.rules import all_rules
from drumline_lint.settings import GivenSettings, Settings, find_rule, make_settings, split_words
from drumline_lint.terminal import print_message, show, show_progress

HELP = """\
usage: {prog} PATH [PATH ...] [flags]

Finds mistakes of distributed training in PyTorch code before a job starts:
where each is, why it matters, and what to write instead. Reads Python,
notebooks, shell and sbatch scripts, Kubernetes and Compose YAML, Dockerfiles,
and never runs or imports what it reads.

  {prog} train.py launch.sbatch       these files
  {prog} .                            all files in this folder
  {prog} . --severity note            also show notes
  {prog} . --select DL012,unguarded-save
  {prog} . --fix --diff               apply mechanical fixes, show them
  {prog} --explain DL012              one rule: why, bad, good
  cat train.py | {prog} - --stdin-filename train.py

what is reported
  --select RULES        only these: numbers, prefixes (DL1) or names
  --ignore RULES        all but these
  --severity LEVEL      show from: note | warning | error  [warning]
  --exclude GLOB        leave out files and folders; may be repeated
  --no-config           ignore [tool.drumline.lint] of pyproject.toml
  --stdin-filename F    the name of the text that `-` reads

only what is new
  --since REV           findings on lines that changed since a git revision
  --write-baseline FILE record today's findings
  --baseline FILE       all findings but those

output
  --format FORMAT       text | json | sarif | github  [text]
  --output FILE         write to a file
  --statistics          count findings per rule
  --exit-zero           exit with 0 in spite of findings and unreadable files

speed
  --jobs N              processes for many files  [auto: one for each core]
  --no-cache            run all rules, also if no file changed
  --cache-dir DIR       where results are kept  [~/.cache/drumline-lint]

fixes
  --fix                 apply the mechanical ones
  --diff                show them; without --fix, nothing is written

rules
  --list                all of them, one line each
  --explain RULE        one of them, with wrong code and right code
  --version             the version of the linter
  --help                this text

`# noqa: DL012` on a line silences a rule there, `# noqa` all of them.

exit codes: 0 no error and no warning (notes never fail), 1 there are some,
            2 wrong usage, or a file that could not be read
"""
MANY_FILES = 50
"""So many that a person waits."""
UNEXPECTED = (
    "try: report it as a bug, with the lines above, unless they name something that you can fix"
)
FORMATS = ("text", "json", "sarif", "github")
_LISTED_FLAGS = ("--select", "--ignore", "--exclude")
_VALUED_FLAGS = "explain output stdin-filename since baseline write-baseline cache-dir jobs"
_SWITCHES = "fix diff statistics list exit-zero no-config no-cache version"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, next_step=f"read {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point of `drumline-lint`; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")

    try:
        return run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except Exception as error:
        frames = traceback.format_exc().splitlines()
        print_message(
            "drumline-lint", f"error: {type(error).__name__}: {error}", *frames, UNEXPECTED
        )
        return ExitCode.USAGE


def run(argv: Sequence[str], *, prog: str = "drumline-lint") -> int:
    """Run the command under the name `prog`; returns the exit code."""
    try:
        return _run(argv, prog)
    except UsageError as error:
        print_message(prog.split()[0], f"error: {error.what}", *error.more)
        return ExitCode.USAGE


def _run(argv: Sequence[str], prog: str) -> int:
    """Print what a flag asks for, or lint."""
    flags = _flags(argv, prog)
    if flags.help:
        return _print(HELP.format(prog=prog))
    if flags.version:
        return _print(f"drumline-lint {__version__}\n")

    rules = all_rules()
    docs = all_docs(rules)
    if flags.list:
        return _print(as_list(docs.values()))
    if flags.explain is not None:
        return _print(as_explanation(find_rule(flags.explain, docs, where="--explain")))

    _refuse_contradictions(flags)
    collected = gc.isenabled()
    gc.disable()  # the trees of all files are kept until the end, and would be scanned repeatedly
    try:
        return _lint(flags, rules, docs)
    finally:
        gc.freeze()  # do not free them one by one at exit
        if collected:
            gc.enable()


# Flags


def _flags(argv: Sequence[str], prog: str) -> argparse.Namespace:
    """Raises UsageError where they are wrong."""
    parser = _Parser(prog=prog, add_help=False, allow_abbrev=False)
    parser.add_argument("paths", nargs="*")

    for name in _LISTED_FLAGS:
        parser.add_argument(name, action="append", default=[])
    parser.add_argument("--format", choices=FORMATS)
    parser.add_argument("--severity", choices=[*map(str, Severity)])
    for name in _VALUED_FLAGS.split():
        parser.add_argument(f"--{name}")

    for name in _SWITCHES.split():
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--help", "-h", action="store_true")

    flags, unknown = parser.parse_known_intermixed_args(list(argv))
    if unknown:
        flag_names = [name for action in parser._actions for name in action.option_strings]
        flag = unknown[0].partition("=")[0]
        meant = did_you_mean(flag, flag_names)
        hint = f"; {meant}" if meant.startswith("did") else ""
        raise UsageError(f"{prog} has no flag {flag}{hint}", next_step=f"read {prog} --help")

    flags.prog = prog
    return flags


def _refuse_contradictions(flags: argparse.Namespace) -> None:
    """Raises UsageError where flags do not go together: `--fix -`."""
    if not flags.paths:
        raise UsageError(
            "no PATH was given", next_step=f"give files or folders, as in: {flags.prog} ."
        )

    stdin = "-" in flags.paths
    is_json = flags.format in ("json", "sarif")
    changes = flags.fix or flags.diff
    contradictions = (
        (flags.stdin_filename and not stdin, "--stdin-filename belongs to the path -"),
        (flags.fix and stdin, "what comes from the standard input cannot be fixed; use --diff"),
        (flags.since and stdin, "--since is about files, not the standard input"),
        (flags.since and changes, "--since is about the lines as they are, not --fix or --diff"),
        (
            flags.write_baseline and (flags.since or flags.baseline or changes),
            "--write-baseline records all findings: leave out --since, --baseline, --fix and --diff",
        ),
        (
            flags.statistics and flags.format not in (None, "text"),
            "--statistics are text; --format json has them in summary.by_rule",
        ),
        (
            flags.diff and is_json and flags.output is None,
            f"--diff and --format {flags.format} would both be on the standard output; give --output FILE",
        ),
    )
    for is_wrong, message in contradictions:
        if is_wrong:
            raise UsageError(message)


def _settings(arguments: argparse.Namespace, docs: Mapping[str, Rule]) -> Settings:
    """The settings of the flags, and of the file that is nearest to the first path."""
    flags = GivenSettings(
        select=split_words(arguments.select),
        ignore=split_words(arguments.ignore),
        exclude=arguments.exclude,
        severity=None if arguments.severity is None else Severity(arguments.severity),
    )

    first = arguments.paths[0]
    if first == "-":
        first = arguments.stdin_filename or "."
    return make_settings(flags, docs, start=Path(first), use_file=not arguments.no_config)


# Linting


def _lint(flags: argparse.Namespace, rules: Mapping[str, Any], docs: Mapping[str, Rule]) -> int:
    """Read, check, fix and report, as the flags say; returns the exit code."""
    settings = _settings(flags, docs)
    discovery = find_files(
        [Path(path) for path in flags.paths if path != "-"],
        exclude=settings.exclude,
        root=settings.root,
    )
    is_shown = sys.stderr.isatty() and len(discovery.files) >= MANY_FILES
    progress = _show_progress if is_shown else no_progress

    only_new = _new_findings(flags)
    readings = read_all(discovery.files, stdin=_stdin(flags))

    def checked(readings: Sequence[Reading]) -> Report:
        return only_new(
            check(readings, rules, settings, problems=discovery.problems, progress=progress)
        )

    if flags.fix or flags.diff:
        report = _fix(flags, readings, checked, discovery.outside)
    else:
        results = _run_or_recall(flags, readings, rules, settings, progress)
        report = only_new(sift(readings, results, settings, discovery.problems))

    if flags.write_baseline is not None:
        return _write_baseline(flags, report, docs)
    _report(flags, report, docs)

    if flags.exit_zero:
        return ExitCode.CLEAN
    if not report.is_complete:
        return ExitCode.USAGE
    return ExitCode.CLEAN if report.is_clean else ExitCode.FINDINGS


def _run_or_recall(
    flags: argparse.Namespace,
    readings: Sequence[Reading],
    rules: Mapping[str, Any],
    settings: Settings,
    progress: Progress,
) -> Results:
    """What the rules find, or what they found in the same files before."""
    jobs = _jobs(flags)
    folder = _cache_folder(flags, rules)
    if folder is None:
        return run_rules(readings, rules, settings, progress, jobs=jobs)

    from drumline_lint.run_cache import find_run, keep_run, run_key

    key = run_key(readings, settings.chosen)
    earlier = find_run(folder, key)
    if earlier is not None:
        return earlier

    results = run_rules(readings, rules, settings, progress, jobs=jobs)
    keep_run(folder, key, results)
    return results


def _jobs(flags: argparse.Namespace) -> int:
    """How many processes to use."""
    from drumline_lint.parallel_work import num_processes

    try:
        return num_processes(flags.jobs or "auto")
    except ValueError:
        raise UsageError(f"--jobs {flags.jobs}: give a number from 1 on, or auto") from None


def _cache_folder(flags: argparse.Namespace, rules: Mapping[str, Any]) -> Path | None:
    """The folder of earlier results.

    None if nothing is kept: with --no-cache, for rules from elsewhere, whose code the key does not
    have, and where there is no home.
    """
    is_own = all(isinstance(module, ModuleType) for module in rules.values())
    if flags.no_cache or not is_own:
        return None
    if flags.cache_dir is not None:
        return Path(flags.cache_dir)

    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    return Path(base) / "drumline-lint" if Path(base).is_absolute() else None


def _new_findings(flags: argparse.Namespace) -> Callable[[Report], Report]:
    """Leaves out what the baseline has, or what is on unchanged lines."""
    if flags.baseline is not None:
        from drumline_lint.baseline import read_baseline, without_known

        file = Path(flags.baseline)
        baseline = read_baseline(file)

    if flags.since is not None:
        from drumline_lint.changes import changes_since, on_changed_lines

        changes = changes_since(flags.since, Path(flags.paths[0]))

    def only_new(report: Report) -> Report:
        if flags.since is not None:
            report = on_changed_lines(report, changes)
        if flags.baseline is not None:
            report = without_known(report, file, baseline)
        return report

    return only_new


def _write_baseline(flags: argparse.Namespace, report: Report, docs: Mapping[str, Rule]) -> int:
    """Record the findings; returns the exit code.

    Files that could not be read are reported: they have no findings to record.
    """
    from drumline_lint.baseline import write_baseline

    write_baseline(Path(flags.write_baseline), report)
    findings = plural(len(report.findings), "finding")
    print_message(flags.prog.split()[0], f"{flags.write_baseline}: {findings} recorded")

    if report.is_complete or flags.exit_zero:
        return ExitCode.CLEAN
    _report(flags, replace(report, findings=[], hidden=[]), docs)
    return ExitCode.USAGE


def _stdin(flags: argparse.Namespace) -> tuple[Path, bytes] | None:
    """The standard input and its name, if `-` is among the paths."""
    if "-" not in flags.paths:
        return None
    return Path(flags.stdin_filename or "<stdin>"), sys.stdin.buffer.read()


def _fix(
    flags: argparse.Namespace,
    readings: Sequence[Reading],
    checked: Callable[[Sequence[Reading]], Report],
    outside: Set[Path],
) -> Report:
    """The report after fixing: of the new files, or of the old ones if nothing is written."""
    from drumline_lint.fixing import diff_of, fix, write

    fixed = fix(readings, checked)
    if flags.diff:
        _print(diff_of(fixed))

    if fixed.in_notebooks:
        places = plural(fixed.in_notebooks, "place")
        print_message(
            flags.prog.split()[0],
            f"{places} in notebooks could be fixed, but notebooks are not written: edit them by hand",
        )

    return write(fixed, checked, outside) if flags.fix else checked(readings)


# The report


def _report(flags: argparse.Namespace, report: Report, docs: Mapping[str, Rule]) -> None:
    """Print it, or write it to the file of --output."""
    text = _findings_for(flags, report, docs)
    if flags.output is None:
        _print(text, is_coloured=_is_coloured(flags))
        return

    try:
        Path(flags.output).write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UsageError(f"--output {flags.output} cannot be written: {error.strerror}") from None


def _findings_for(flags: argparse.Namespace, report: Report, docs: Mapping[str, Rule]) -> str:
    """The findings in the format of the flags."""
    colour = _is_coloured(flags)
    if flags.format in (None, "text"):
        if flags.statistics:
            return as_statistics(report, docs, colour=colour)
        return as_text(report, colour=colour)

    from drumline_lint.output import formats

    if flags.format == "json":
        return formats.as_json(report)
    if flags.format == "sarif":
        return formats.as_sarif(report, docs, version=__version__, folder=Path.cwd())
    return formats.as_github(report)


# The terminal


def _is_coloured(flags: argparse.Namespace) -> bool:
    is_text = flags.format in (None, "text") and flags.output is None
    return is_text and sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _print(text: str, *, is_coloured: bool = False) -> int:
    """Returns the exit code of a command that only prints."""
    show(text, is_coloured=is_coloured)
    return ExitCode.CLEAN


def _show_progress(doing: str, number: int, count: int) -> None:
    """Such as: looking at file 20 of 1,300. The last file clears it."""
    if number % 10 == 0 or number == count:
        text = f"{doing} file {number:,} of {count:,}" if number < count else ""
        show_progress(text)

"""How a repository shows that its programs are started: the launches of its scripts and READMEs,
with the options that they give."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from drumline_lint.program.imports import connected, importers, with_imported
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.reading.launchers import Launch
from drumline_lint.reading.mentions import is_mentioned
from drumline_lint.reading.shell_parser import Word
from drumline_lint.reading.source import Source

_TRAINS = re.compile(r"\.backward\(|\.fit\(|Trainer\(")
_OTHER_WORK = re.compile(
    r"eval|test|infer|predict|demo|sampl|generat|export|convert|plot|prepro|prepare|download|visual"
)
_LAUNCHER = re.compile(r"python|torchrun|launch|deepspeed|srun")
_LINE_END = re.compile(r"(?<!\\)\n")
"""Of a logical line: `torchrun \\` is continued on the next one."""
_KEY = re.compile(r"\+*(?:[\w.]+\.)?(\w+)=(.*)", re.DOTALL)
_FLAG = re.compile(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_PASSED_ON = ("$@", "$*", "${@}", "${@:1}", "${@:2}")
"""What a user may add: nothing, as the repository is shipped."""


@dataclass(frozen=True, eq=False)
class ShownRun:
    """One launch of a program, with what it gives the program's options."""

    launch: Launch
    options: Mapping[str, str | None]
    """The values by option, as in `lr` for `--lr 0.1` and `lr=0.1`; None for a bare flag."""
    is_open: bool
    """Whether a variable of unknown value may hold further options."""

    @property
    def settings(self) -> list[Path]:
        """The YAML files that it names, below the script's folder or one above."""
        script = self.launch.script.outermost
        values = [value for value in self.options.values() if value]
        names = [value for value in values if value.endswith((".yaml", ".yml"))]

        paths = [folder / name for name in names for folder in script.path.parents]
        return [path for path in paths if path in script.documents]


@cached_query
def shown_runs(program: Program, source: Source) -> list[ShownRun]:
    """The launches of all programs that run a file."""
    runs: dict[object, ShownRun] = {}

    for launch in shown_launches(program, source):
        run = _read(launch)
        options = tuple(run.options.items())
        runs.setdefault((options, run.is_open, tuple(run.settings)), run)

    return list(runs.values())


def shown_launches(program: Program, source: Source) -> Iterator[Launch]:
    """The launches of all programs that run a file, also those that give the same options."""
    for file in connected(program, source):
        launches = program.starts_of(file)
        if launches and source in with_imported(program, [file]):
            yield from launches


def _read(launch: Launch) -> ShownRun:
    """What a launch gives the options.

    Of `train.py --epochs 3 --amp model.depth=2 $MORE` these are `epochs`: 3, `amp` without a value
    and `depth`: 2; and `$MORE` may hold others.
    """
    options: dict[str, str | None] = {}
    is_open = False
    last = ""  # the flag before a word

    for word in launch.arguments:
        text = launch.script.substituted(word.text)
        flag = _FLAG.fullmatch(text)
        setting = _KEY.fullmatch(text)
        may_be_more = text.startswith("$") and text not in _PASSED_ON

        if flag:
            last = flag[1].replace("-", "_")
            options[last] = flag[2]
        elif last and options[last] is None:
            options[last] = text
            is_open = is_open or (may_be_more and not _is_quoted(launch, word))
        elif setting:
            options[setting[1]] = setting[2]
        elif may_be_more:
            is_open = True

    return ShownRun(launch, options, is_open)


def _is_quoted(launch: Launch, word: Word) -> bool:
    """`"$NAME"`, which is one word, whatever the variable holds."""
    return launch.script.text[word.start : word.start + 1] == '"'


def is_shown(program: Program, source: Source) -> bool:
    """Whether a program that is shown runs a file. Where no launch of training is shown, all are."""
    return source not in _not_shown(program)


def programs_not_shown(program: Program, source: Source) -> list[Source]:
    """The programs that run a file, none of which is shown."""
    hidden = [file for file in program.sources if file in _not_shown(program)]
    programs = [file for file in hidden if _is_program(program, file)]
    return [file for file in programs if source in with_imported(program, [file])]


@cached_query
def _not_shown(program: Program) -> set[Source]:
    """The files that only programs run which no script, no text and no documentation starts.

    Empty where no launch of training is shown: then nothing is known about the others.
    """
    started = {source for source in program.sources if program.starts_of(source)}
    if not any(_is_training(program, source) for source in started):
        return set()

    shown = started | {source for source in program.sources if _is_named(program, source)}
    programs = [source for source in program.sources if _is_program(program, source)]
    hidden = [source for source in programs if source not in shown]
    return with_imported(program, hidden) - with_imported(program, shown)


def _is_training(program: Program, source: Source) -> bool:
    """Whether a program trains, by its code, and does not say otherwise, as `evaluate.py` does."""
    if _OTHER_WORK.search(source.path.stem.lower()):
        return False

    return any(_TRAINS.search(file.text) for file in with_imported(program, [source]))


def _is_named(program: Program, source: Source) -> bool:
    """By a text of the repository, or as a program in its own documentation."""
    if source.is_notebook or is_mentioned(source.path, program.mentioned):
        return True

    return _is_started_in_text(source.path.stem, source.text)


def _is_started_in_text(stem: str, text: str) -> bool:
    """`torchrun --nproc_per_node=8 train.py`, in the documentation of a program itself."""
    if f"{stem}.py" not in text:
        return False

    program = re.compile(rf"\b{re.escape(stem)}\.py\b")
    for line in _LINE_END.split(text):
        launcher = _LAUNCHER.search(line)
        if launcher and program.search(line, launcher.end()):
            return True

    return False


def _is_program(program: Program, source: Source) -> bool:
    """Whether it is started, rather than imported: it has code for `__main__`, or reads a command
    line and nothing imports it."""
    if source.is_test:
        return False

    reads_words = "parse_args" in source.text or "sys.argv" in source.text
    return "__main__" in source.text or (reads_words and not importers(program, source))

"""One shell script: its commands, the known values of its variables, and its Slurm options.

Of this script the options are `nodes` and `gres`, the variables PORT, and the last word of the
command is known to be `--master-port=29500`:

    #SBATCH --nodes=2 --gres=gpu:8
    PORT=29500
    srun torchrun --master-port=$PORT
"""

from __future__ import annotations

import re
import textwrap
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from drumline_lint.findings import Place
from drumline_lint.reading.shell_parser import (
    ASSIGNMENT,
    Command,
    Word,
    inside_quotes,
    read_commands,
)
from drumline_lint.reading.slurm import Options, header_options
from drumline_lint.reading.source import Lines, Silenced, silenced_lines

_DECLARES = {"export", "declare", "typeset", "local", "readonly"}
# By loops and builtins, and in arithmetic: `((rank++))`.
_CHANGED_ELSEWHERE = re.compile(
    r"\b(?:(?:for|select)[ \t]+(\w+)|(?:read|unset|mapfile|readarray|getopts|let)\b([^\n;&|]*))"
    r"|\b([A-Za-z_]\w*)(?:\+\+|--(?=\))|[-*/]=)|\(\([ \t]*([A-Za-z_]\w*)[ \t]*="
)
# What Slurm sets from the header.
_OPTIONS_OF_VARIABLES = {
    "SLURM_NNODES": "nodes",
    "SLURM_JOB_NUM_NODES": "nodes",
    "SLURM_NTASKS": "ntasks",
    "SLURM_NTASKS_PER_NODE": "ntasks-per-node",
    "SLURM_GPUS_PER_NODE": "gpus-per-node",
    "SLURM_CPUS_PER_TASK": "cpus-per-task",
}
# `$NAME`, `${NAME}` and `${NAME:-1}`; not `\$NAME`.
_VARIABLE = re.compile(r"(?<!\\)\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?::?[-=][^{}]*)?\})")
# A word that is one variable: `$NAME`, `${NAME}`, `"${NAME[@]}"`.
_LIST = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})|\"?\$\{([A-Za-z_]\w*)\[[@*]\]\}\"?")
# `cat > run.sh <<'END'`, and the same with the file last.
_WRITTEN = re.compile(
    r"(?:>|\btee)[ \t]*(?P<file>[^\s<>|&;]+)[ \t]*<<-?[ \t]*(?P<quote>['\"]?)(?P<end>\w+)(?P=quote)[ \t]*\n"
    r"|<<-?[ \t]*(?P<quote_first>['\"]?)(?P<end_first>\w+)(?P=quote_first)[ \t]*>[ \t]*(?P<file_last>\S+)[ \t]*\n"
)
# `start() { cat <<'END' ... END }`, and `start > run.sh`.
_PRINTED = re.compile(
    r"^[ \t]*(?:function[ \t]+)?(?P<name>\w+)[ \t]*\(\)\s*\{\s*cat[ \t]*<<-?[ \t]*(?P<quote>['\"]?)(?P<end>\w+)"
    r"(?P=quote)[ \t]*\n",
    re.MULTILINE,
)
_WORD_ALONE = re.compile(r"^[ \t]*(\w+)[ \t\r]*$", re.MULTILINE)
_PRINTS_TO = re.compile(r"^[ \t]*(\w+)[ \t]*>[ \t]*(\S+)", re.MULTILINE)
# Behind a command, what it gets as its input: `ssh gpu1 bash -s <<'END'`.
_INPUT = re.compile(
    r"[ \t]*<<-?[ \t]*(?P<quote>['\"]?)(?P<end>\w+)(?P=quote)[^\n]*\n(?P<code>.*?\n)[ \t]*(?P=end)[ \t\r]*$",
    re.DOTALL | re.MULTILINE,
)
_LONGEST_VALUE = 4000
_DEEPEST = 8


@dataclass(frozen=True, eq=False)
class Assignment:
    """`NAME=value`, in any position."""

    script: Script
    name: str
    value: Word
    """The part after the equals sign."""
    start: int
    end: int
    command: Command | None = None
    """None for a variable that a container is started with."""
    is_exported: bool = True
    """Whether it is exported here: with `export`, or before a command; otherwise it may be exported
    elsewhere."""
    is_for_command: bool = False
    """Whether it is before a command, and only for that command."""
    is_appended: bool = False

    @property
    def is_seen(self) -> bool:
        """Whether other programs see the variable."""
        return self.is_exported or self.name in self.script.exported

    @property
    def is_conditional(self) -> bool:
        """Whether it may not happen, as in the body of an `if`."""
        return self.command is not None and self.command.is_conditional

    @property
    def constant(self) -> str | None:
        """The value, if it follows from the script."""
        return self.script.constant(self.value)


TextRange: TypeAlias = Word | Assignment


@dataclass(frozen=True)
class WrittenFile:
    """A script that another writes by a here-document, to a file or to a shell."""

    start: int
    end: int
    is_quoted: bool
    """Whether its variables are left to the shell that runs it."""


@dataclass(frozen=True)
class Refusal:
    """Something for which Kubernetes refuses a manifest."""

    place: Word
    message: str
    fix: str


@dataclass(frozen=True, kw_only=True)
class Container:
    """What a manifest, a Compose file or a Dockerfile decides about the processes of a
    container."""

    kind: str
    """Of a manifest, such as `PyTorchJob`; `service` for Compose, `image` for a Dockerfile."""
    replicas: int | None = 1
    """How many containers run the same command; None if it is not known."""
    gpus: int | None = None
    is_without_gpu: bool = False
    """Whether it is known to see no GPU."""
    shared_memory: int | None = None
    """Bytes of /dev/shm; None if it is as large as the memory, or not decided here."""
    processes: Word | None = None
    """A PyTorchJob's nprocPerNode."""
    is_on_shared_network: bool = False
    """Whether it shares its loopback interface, with the host or another container."""
    name: Word | None = None
    refused: tuple[Refusal, ...] = ()
    hosts: frozenset[str] = frozenset()
    """The names that it can be reached by, with those of the other services of a Compose file."""
    services: list[Script] = field(default_factory=list)
    """All containers of a Compose file, in its order."""
    replaced: frozenset[str] = frozenset()
    """Variables of a service that `<<` would have brought, had it no environment of its own."""
    unresolved: str = ""
    """Why the names of services cannot be resolved in it; empty if they can."""

    @property
    def sets_torchrun_flags(self) -> bool:
        """Kubeflow's operator sets PET_NNODES, PET_NODE_RANK and PET_MASTER_ADDR."""
        return self.kind in {"PyTorchJob", "TrainJob"}


@dataclass(eq=False)
class Script:
    """A shell script, or the commands of a container; any text is accepted."""

    path: Path
    text: str
    outer: Script | None = None
    """For the code in `bash -c '...'`, the script that contains it."""
    container: Container | None = None
    written_commands: Sequence[Command] | None = None
    """The commands, where the text is not all shell."""
    environment: list[Assignment] = field(default_factory=list)
    """Variables that are set outside of the shell's code."""
    line_starts: Sequence[int] = ()
    """Where the lines of the file begin, if the text has lost some of them."""
    documents: Mapping[Path, str] = field(default_factory=dict)
    """The texts of settings, by the path of the file."""
    is_readme: bool = False
    """Whether it only tells how files are started."""

    @cached_property
    def silenced(self) -> Silenced:
        """The lines with `# noqa`; after a command over several lines, it applies to all of
        them."""
        return silenced_lines(self.text, lambda: map(self._lines, self.commands))

    @cached_property
    def commands(self) -> list[Command]:
        """In the order of the text."""
        if self.written_commands is not None:
            return list(self.written_commands)
        return read_commands(self.text)

    @cached_property
    def sbatch(self) -> Options:
        """The options of the `#SBATCH` lines."""
        if self.outer is not None:
            return self.outer.sbatch
        return Options() if self.container else header_options(self.text)

    @property
    def outermost(self) -> Script:
        """The script of the file."""
        return self if self.outer is None else self.outer.outermost

    def inner(self, start: int, end: int) -> Script:
        """The script that another shell reads from this part of the text."""
        return Script(
            self.path,
            self.text,
            outer=self,
            container=self.container,
            written_commands=read_commands(self.text, start, end),
            line_starts=self._line_starts,
            is_readme=self.is_readme,
        )

    @cached_property
    def written_files(self) -> Mapping[str, WrittenFile]:
        """By their names, as they are written without quotes."""
        files: dict[str, WrittenFile] = {}
        if "<<" not in self.text:
            return files

        for written, file in _here_documents(self.text, _WRITTEN):
            name = written["file"] or written["file_last"]
            files[name.replace('"', "").removeprefix("./")] = file

        printed = _here_documents(self.text, _PRINTED)
        printers = {function["name"]: file for function, file in printed}
        for function, name in _PRINTS_TO.findall(self.text) if printers else ():
            if function in printers:
                files[name.replace('"', "").removeprefix("./")] = printers[function]

        return files

    def input_of(self, command: Command) -> WrittenFile | None:
        """The here-document that a command reads: `ssh gpu1 bash -s <<'END'`."""
        text = _INPUT.match(self.text, command.end)
        return WrittenFile(*text.span("code"), bool(text["quote"])) if text else None

    @cached_property
    def assignments(self) -> list[Assignment]:
        """All assignments, those outside of the code first."""
        in_code = [item for command in self.commands for item in self._assignments(command)]
        return [*self.environment, *in_code]

    @cached_property
    def variables(self) -> Mapping[str, list[Assignment]]:
        """The assignments of each name, without those for a single command."""
        by_name: dict[str, list[Assignment]] = {}

        for assignment in self.assignments:
            if not assignment.is_for_command:
                by_name.setdefault(assignment.name, []).append(assignment)

        return by_name

    @cached_property
    def command_variables(self) -> Mapping[tuple[int, str], Assignment]:
        """The assignments before a command and for it alone, by where it begins."""
        by_place: dict[tuple[int, str], Assignment] = {}

        for assignment in self.assignments:
            if assignment.is_for_command and assignment.command:
                by_place[assignment.command.start, assignment.name] = assignment

        return by_place

    @cached_property
    def exported(self) -> frozenset[str]:
        """The names of the variables that the programs of the script see."""
        names = set[str]()
        for assignment in self.assignments:
            if assignment.is_exported and not assignment.is_for_command:
                names.add(assignment.name)

        for command in self.commands:
            if _exports(command):
                names.update(word.head for word in command.words[1:] if word.head.isidentifier())

        return frozenset(names)

    def constant(self, word: Word) -> str | None:
        """The value of a word, if it follows from the script."""
        text = word.text
        if self.container is not None and self.container.kind == "service":
            # Compose has its own variables, and `$$` for those of the shell.
            text = text.replace("$$", "$")

        value = self.substituted(text)
        return None if "$" in value or "`" in value else value

    def substituted(self, text: str, depth: int = 0) -> str:
        """The text with the values of those variables that are known.

        After `PORT=29500`, `$HOST:$PORT` becomes `$HOST:29500`.
        """
        if len(text) > _LONGEST_VALUE or depth > _DEEPEST:
            return "$"

        def value_of(variable: re.Match[str]) -> str:
            return self._value(variable[1] or variable[2], depth) or variable[0]

        return _VARIABLE.sub(value_of, text)

    def source_of(self, word: Word) -> TextRange:
        """Where a word's value is written: the word itself, or the assignment of its only variable.

        Of `--nnodes=$N` it is `N=2`, if that is the only assignment.
        """
        names = [name[1] or name[2] for name in _VARIABLE.finditer(word.text)]
        if len(names) != 1:
            return word

        assigned = self.variables.get(names[0], [])
        return assigned[0] if len(assigned) == 1 else word

    def expanded(self, words: Sequence[Word], depth: int = 0) -> Iterator[Word]:
        """Words, with variables that hold a known list of words replaced by it.

        `$ARGS` after `ARGS="--nnodes 2"` is two words.
        """
        for word in words:
            inner = self._list_in(word) if depth < _DEEPEST else None
            if inner is None:
                yield word
            else:
                yield from self.expanded(inner, depth + 1)

    def place(self, node: TextRange) -> Place:
        """Where a word or an assignment is written."""
        line, column = self._position(node.start)
        end_line, end_column = self._position(node.end)

        return Place(
            path=str(self.path), line=line, column=column, end_line=end_line, end_column=end_column
        )

    def position(self, offset: int) -> tuple[int, int]:
        """Line and column as an edit counts them: from 1 and 0, columns in bytes of UTF-8, as `ast`
        does."""
        line, column = self._position(offset)
        start = offset - column + 1
        return line, len(self.text[start:offset].encode(errors="surrogateescape"))

    def _position(self, offset: int) -> tuple[int, int]:
        """Line and column, both from 1."""
        line = bisect_right(self._line_starts, offset)
        return line, offset - self._line_starts[line - 1] + 1

    def _lines(self, command: Command) -> Lines:
        """The first and the last line of a command."""
        return self._position(command.start)[0], self._position(command.end)[0]

    @cached_property
    def _line_starts(self) -> Sequence[int]:
        return self.line_starts or line_starts(self.text)

    @cached_property
    def _changed_elsewhere(self) -> frozenset[str]:
        """Names that loops, `read` and the like may change."""
        if self.outer is not None:
            return self.outer._changed_elsewhere
        if self.container:
            return frozenset()

        names = set[str]()
        for changing in _CHANGED_ELSEWHERE.finditer(self.text):
            text = " ".join(filter(None, changing.groups()))
            names.update(re.findall(r"[A-Za-z_]\w*", text))

        return frozenset(names)

    def _value(self, name: str, depth: int) -> str | None:
        """The value of a variable, if it follows from the script or from the header."""
        if name not in self.variables:
            if self.outer is not None:
                return self.outer._value(name, depth)
            if name in _OPTIONS_OF_VARIABLES:
                count = self.sbatch.number(_OPTIONS_OF_VARIABLES[name])
                return None if count is None else str(count)

        assignment = self._only_assignment(name)
        if assignment is None or assignment.value.items is not None:
            return None

        return self.substituted(assignment.value.text, depth + 1)

    def _only_assignment(self, name: str) -> Assignment | None:
        """The one that gives a name its value in the whole script."""
        assigned = self.variables.get(name, [])
        if len(assigned) != 1 or name in self._changed_elsewhere:
            return None

        is_certain = not assigned[0].is_appended and not assigned[0].is_conditional
        return assigned[0] if is_certain else None

    def _list_in(self, word: Word) -> Sequence[Word] | None:
        """The words of `"${NAME[@]}"`, or of `$NAME` without quotes, if they are known."""
        name = _LIST.fullmatch(self.text, word.start, word.end) if "$" in word.text else None
        assignment = self._only_assignment(name[1] or name[2] or name[3]) if name else None
        if name is None or assignment is None:
            return None

        is_array = name[3] is not None
        if is_array or assignment.value.items is not None:
            return assignment.value.items if is_array else None

        inside = inside_quotes(self.text, assignment.value)
        # A newline in a value is a blank.
        commands = read_commands(self.text, *inside) if inside else []
        return [inner for command in commands for inner in command.words] or None

    def _assignments(self, command: Command) -> Iterator[Assignment]:
        """Before a command, or as the words of `export` or `env`.

        - `A=1` is for the script
        - `export A=1` too, and programs see it
        - `A=1 torchrun train.py` and `env A=1 torchrun train.py` are for this command
        """
        words = command.words
        num_before = [*map(self._is_assignment, words), False].index(False)
        program = words[num_before].plain if num_before < len(words) else None
        if program != "env" and program not in _DECLARES:
            words = words[:num_before]

        for number, word in enumerate(words):
            if not self._is_assignment(word):
                continue

            target = word.text.partition("=")[0]  # `NAME`, `NAME+`, `NAME[0]`
            is_before = program is not None and number < num_before
            is_for_command = is_before or program == "env"
            yield Assignment(
                self,
                re.split(r"[+\[]", target, maxsplit=1)[0],
                word.behind(len(target) + 1),
                word.start,
                word.end,
                command,
                is_exported=is_for_command or _exports(command),
                is_for_command=is_for_command,
                is_appended=target.endswith(("+", "]")),
            )

    def _is_assignment(self, word: Word) -> bool:
        """`NAME=value`, `NAME+=value`, `NAME[0]=value`."""
        return ASSIGNMENT.match(self.text, word.start, word.end) is not None


# A block of code in Markdown, with its language.
_FENCE = re.compile(
    r"^[ \t]*(?:```|~~~)[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*(?:```|~~~)", re.DOTALL | re.MULTILINE
)
# A block of code that is indented by four blanks, and has a launch.
_INDENTED = re.compile(r"(?:^|(?<=\n))[ \t]*\n((?:(?: {4}|\t)[^\n]*\n|[ \t]*\n(?= {4}|\t))+)")
_LAUNCH_IN_BLOCK = re.compile(
    r"^[ \t]*(?:[$>%] )?(?:[A-Z_]+=\S+ )*(?:torchrun|accelerate|deepspeed|python3?) ", re.MULTILINE
)
_OTHER_CODE = ("python", "py", "json", "yaml", "bibtex", "latex", "diff")
# `$ torchrun train.py`.
_PROMPT = re.compile(r"^[ \t]*[$>%] ", re.MULTILINE)


def read_readme(path: Path, text: str) -> Script:
    """The commands in its blocks of code, but for those in Python."""
    blocks = [block[2] for block in _FENCE.finditer(text) if block[1].lower() not in _OTHER_CODE]
    indented = [block[1] for block in _INDENTED.finditer(_FENCE.sub("", text))]
    blocks += [textwrap.dedent(block) for block in indented if _LAUNCH_IN_BLOCK.search(block)]
    commands = _PROMPT.sub("", "\n".join(blocks))

    return Script(path, commands, is_readme=True)


def line_starts(text: str) -> Sequence[int]:
    """Where the lines of a text begin."""
    return [0, *(line_end.end() for line_end in re.finditer(r"\r\n|\n|\r", text))]


def _here_documents(
    text: str, opening: re.Pattern[str]
) -> Iterator[tuple[re.Match[str], WrittenFile]]:
    """What follows each opening, up to the line with its word alone: in time linear in the text,
    also where none is closed."""
    closings: dict[str, list[int]] = {}
    for line in _WORD_ALONE.finditer(text):
        closings.setdefault(line[1], []).append(line.start())

    closed = 0
    for opened in opening.finditer(text):
        words = opened.groupdict()
        ends = closings.get(words["end"] or words["end_first"], [])
        number = bisect_left(ends, opened.end())
        if opened.start() < closed or number == len(ends):
            continue

        closed = ends[number]
        quote = words["quote"] or words.get("quote_first")
        yield opened, WrittenFile(opened.end(), closed, bool(quote))


def _exports(command: Command) -> bool:
    """`export`, `declare -x` and `typeset -x`."""
    words = [word.plain or "" for word in command.words]
    if words[0] == "export":
        return True

    is_declared = words[0] in {"declare", "typeset"}
    return is_declared and any(re.fullmatch(r"-\w*x\w*", word) for word in words[1:])

"""One shell script: its commands, the known values of its variables, and its Slurm options."""

from __future__ import annotations

import ast
import operator
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from drumline_lint.findings import Place
from drumline_lint.reading.shell_parser import (
    ASSIGNMENT,
    Command,
    Kind,
    Loop,
    Piece,
    Word,
    inside_quotes,
    read_commands,
)
from drumline_lint.reading.slurm import HEREDOC, Options, header_options
from drumline_lint.reading.source import Lines, Silenced, silenced_lines

_DECLARES = {"export", "declare", "typeset", "local", "readonly"}
# By loops and builtins, and in arithmetic: `((rank++))`.
_CHANGED_ELSEWHERE = re.compile(
    r"\b(?:(?:for|select)[ \t]+(\w+)|(?:read|unset|mapfile|readarray|getopts|let)\b([^\n;&|]*))"
    r"|\b([A-Za-z_]\w*)(?:\+\+|--(?=\))|[-*/]=)|\(\([ \t]*([A-Za-z_]\w*)[ \t]*="
)
_NUMBER_OF_NODES = {"SLURM_NNODES", "SLURM_JOB_NUM_NODES"}
_COUNTS_IN_HEADER = {"cpus-per-task", "gpus-per-node", "ntasks", "ntasks-per-node"}
# `${NNODES:-1}`: the variable, and what is taken where it is not set.
_WITH_DEFAULT = re.compile(r"\$\{([A-Za-z_]\w*):?[-=]([^${}`\\]*)\}")
# `$((NNODES * 8))`, in which bash needs no dollar signs.
_ARITHMETIC = re.compile(r"\$\(\(([\w\s+*/%${}()-]{1,200})\)\)")
_ARRAY_LENGTH = re.compile(r"\$\{#([A-Za-z_]\w*)\[[@*]\]\}")
_RANGE = re.compile(r"\{(\d{1,4})\.\.(\d{1,4})\}|\$\(seq(?: (\d{1,4}))? (\d{1,4})\)")
_LONGEST_VALUE = 4000
_DEEPEST = 12


@dataclass(frozen=True)
class Assignment:
    """`NAME=value`, in any position."""

    name: str
    value: Word
    """The part after the equals sign."""
    command: Command
    is_exported: bool
    """Whether it is exported here: with `export`, or before a command; otherwise it may be exported
    elsewhere."""
    is_for_command: bool
    """Whether it is before a command, and only for that command."""
    is_appended: bool
    items: Sequence[Word] | None
    """The words of an array."""
    start: int
    end: int


TextRange: TypeAlias = Word | Assignment


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
    names_in_pod: frozenset[str] = frozenset()
    refused: tuple[Refusal, ...] = ()
    hosts: frozenset[str] = frozenset()
    """The names that it can be reached by, with those of the other services of a Compose file."""
    unresolved: str = ""
    """Why the names of services cannot be resolved in it; empty if they can."""
    is_indexed: bool = False
    """Whether each pod has a JOB_COMPLETION_INDEX."""

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
    environment: Sequence[Assignment] = ()
    """Variables that are set outside of the shell's code."""
    siblings: Sequence[Script] = ()
    """For a service, those before it in the same Compose file; for the script of a node, those of the
    nodes before it."""
    line_starts: Sequence[int] | None = None
    """Where the lines of the file begin, if the text has lost some of them."""
    _values: dict[str, str | None] = field(default_factory=dict, repr=False)

    @cached_property
    def silenced(self) -> Silenced:
        """The lines with `# noqa`; after a command over several lines, it applies to all of
        them."""
        return silenced_lines(self.text, lambda: map(self._lines, self.commands))

    @cached_property
    def commands(self) -> list[Command]:
        """In the order of the text, with those in `$(...)` before the command that contains
        them."""
        if self.written_commands is not None:
            return list(self.written_commands)
        return read_commands(self.text)

    @cached_property
    def sbatch(self) -> Options:
        """The options of the `#SBATCH` lines."""
        if self.outer is not None:
            return self.outer.sbatch
        return Options() if self.container else header_options(self.text)

    def inner(self, start: int, end: int) -> Script:
        """The script that another shell reads from this part of the text."""
        return Script(
            self.path,
            self.text,
            outer=self,
            container=self.container,
            written_commands=read_commands(self.text, start, end),
            line_starts=self._line_starts,
        )

    @cached_property
    def written_scripts(self) -> list[Script]:
        """The scripts in its heredocs, each in a text in which all else is blank."""
        return [
            Script(self.path, _alone(self.text, heredoc), line_starts=self._line_starts)
            for heredoc in HEREDOC.finditer(self.text)
            if _is_script(self.text, heredoc)
        ]

    @cached_property
    def on_slurm(self) -> bool:
        return bool(self.sbatch.by_name) or any(
            command.words[0].plain == "srun" for command in self.commands
        )

    @cached_property
    def has_flags_in_variables(self) -> bool:
        """torchrun also reads each flag from a variable: PET_RDZV_ID."""
        return self.outer.has_flags_in_variables if self.outer else "PET_" in self.text

    @cached_property
    def assignments(self) -> list[Assignment]:
        in_code = [
            assignment for command in self.commands for assignment in self._assignments(command)
        ]
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
    def command_variables(self) -> Mapping[int, list[Assignment]]:
        """The assignments before a command and for it alone, by where the command begins."""
        by_command: dict[int, list[Assignment]] = {}
        for assignment in self.assignments:
            if assignment.is_for_command:
                by_command.setdefault(assignment.command.start, []).append(assignment)
        return by_command

    @cached_property
    def exported(self) -> frozenset[str]:
        names = {
            assignment.name
            for assignment in self.assignments
            if assignment.is_exported and not assignment.is_for_command
        }
        for command in self.commands:
            if command.words[0].plain == "export" or _exports(command):
                plain = [word.plain or "" for word in command.words[1:]]
                names.update(word for word in plain if word.isidentifier())
        return frozenset(names)

    def constant(self, word: Word, depth: int = 0) -> str | None:
        """The value of a word, if it follows from the script."""
        parts: list[str] = []
        for piece in word.pieces:
            value = piece.text if piece.kind is Kind.TEXT else self._value(piece, depth)
            # A dollar sign that this shell leaves alone is for a later one: `\$SLURM_PROCID`.
            if value is None or "$" in value:
                return None
            parts.append(value)
        joined = "".join(parts)
        return joined if len(joined) <= _LONGEST_VALUE else None

    def default(self, word: Word) -> str | None:
        """The value of a word where nothing outside of the script sets its variables:
        `${NNODES:-2}`."""
        parts = [
            piece.text if piece.kind is Kind.TEXT else self._default_of(piece)
            for piece in word.pieces
        ]
        return None if None in parts else "".join(part or "" for part in parts)

    def _default_of(self, piece: Piece) -> str | None:
        if (value := self._value(piece, 0)) is not None:
            return value
        assignment = self._only_assignment(piece.text) if piece.kind is Kind.VARIABLE else None
        if assignment is not None and len(assignment.value.pieces) == 1:
            piece = assignment.value.pieces[0]
        with_default = _WITH_DEFAULT.fullmatch(piece.text) if piece.kind is Kind.UNKNOWN else None
        return with_default[2] if with_default else None

    def loop_values(self, loop: Loop) -> list[str] | None:
        """The values that the variable of a loop gets."""
        values: list[str] = []
        for word in self.expanded(loop.words):
            counted = _RANGE.fullmatch(self.text[word.start : word.end])
            if counted:
                first = int(counted[1] or counted[3] or (counted[1] is None))
                last = int(counted[2] or counted[4])
                values += [str(number) for number in range(first, last + 1)]
            elif (value := self.constant(word)) is not None:
                values.append(value)
            else:
                return None
        return values or None

    def source_of(self, word: Word) -> TextRange:
        """Where a word's value is written: the word itself, or the assignment of its only
        variable."""
        names = [piece.text for piece in word.pieces if piece.kind is Kind.VARIABLE]
        assigned = self.variables.get(names[0], []) if len(names) == 1 else []
        return assigned[0] if len(assigned) == 1 else word

    def expanded(self, words: Sequence[Word], depth: int = 0) -> Iterator[Word]:
        """Words, with variables that hold a known list of words replaced by it."""
        for word in words:
            inner = self._list_in(word) if depth < _DEEPEST else None
            if inner is None:
                yield word
            else:
                yield from self.expanded(inner, depth + 1)

    def place(self, node: TextRange) -> Place:
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
        line = bisect_right(self._line_starts, offset)
        return line, offset - self._line_starts[line - 1] + 1

    def _lines(self, command: Command) -> Lines:
        return self._position(command.start)[0], self._position(command.end)[0]

    @cached_property
    def _line_starts(self) -> Sequence[int]:
        if self.line_starts is not None:
            return self.line_starts
        return [0, *(line_end.end() for line_end in re.finditer(r"\r\n|\n|\r", self.text))]

    @cached_property
    def _changed_elsewhere(self) -> frozenset[str]:
        """Names that loops, `read` and the like may change."""
        if self.outer is not None:
            return self.outer._changed_elsewhere
        start = 0
        end = len(self.text)
        if self.container is not None:
            # The rest of the file belongs to other containers.
            start = min((command.start for command in self.commands), default=0)
            end = max((command.end for command in self.commands), default=0)
        return frozenset(
            name
            for changing in _CHANGED_ELSEWHERE.finditer(self.text, start, end)
            for name in re.findall(r"[A-Za-z_]\w*", " ".join(filter(None, changing.groups())))
        )

    def _value(self, piece: Piece, depth: int) -> str | None:
        name = piece.text
        if depth > _DEEPEST:
            return None
        if piece.kind is Kind.UNKNOWN:
            return self._computed(piece.text, depth)
        if piece.kind is not Kind.VARIABLE:
            return None
        if name not in self._values:
            self._values[name] = None  # A variable that refers to itself is unknown.
            self._values[name] = self._value_of_name(name, depth)
        return self._values[name]

    def _computed(self, written: str, depth: int) -> str | None:
        """The value of `$((2 * NUM_GPUS))`, or of `${NAME:-1}` if the script sets NAME."""
        if with_default := _WITH_DEFAULT.fullmatch(written):
            return self._value(Piece(Kind.VARIABLE, with_default[1]), depth + 1)
        if length := _ARRAY_LENGTH.fullmatch(written):
            return self._length_of(length[1])
        arithmetic = _ARITHMETIC.fullmatch(written)
        if arithmetic is None:
            return None
        names = re.sub(r"\$\{?([A-Za-z_]\w*)\}?", r"\1", arithmetic[1])
        numbers = re.sub(
            r"[A-Za-z_]\w*",
            lambda name: self._value(Piece(Kind.VARIABLE, name[0]), depth + 1) or "?",
            names,
        )
        return _calculated(numbers)

    def _length_of(self, array: str) -> str | None:
        assignment = self._only_assignment(array)
        items = assignment.items if assignment else None
        is_counted = items is not None and all(
            piece.kind is Kind.TEXT or piece.is_quoted for item in items for piece in item.pieces
        )
        return str(len(items or ())) if is_counted else None

    def _value_of_name(self, name: str, depth: int) -> str | None:
        if self.outer is not None and name not in self.variables:
            return self.outer._value_of_name(name, depth)
        if name.startswith("SLURM_") and name not in self.variables:
            count = self._slurm_count(name)
            return None if count is None else str(count)
        assignment = self._only_assignment(name)
        if assignment is None or assignment.items is not None:
            return None
        return self.constant(assignment.value, depth + 1)

    def _slurm_count(self, name: str) -> int | None:
        """A variable that Slurm sets from the header."""
        if name in _NUMBER_OF_NODES:
            return self.sbatch.number("nodes")
        if name == "SLURM_GPUS_ON_NODE":
            return self.sbatch.gpus_per_node
        option = name.removeprefix("SLURM_").lower().replace("_", "-")
        return self.sbatch.number(option) if option in _COUNTS_IN_HEADER else None

    def _only_assignment(self, name: str) -> Assignment | None:
        """The one that gives a name its value in the whole script."""
        assigned = self.variables.get(name, [])
        if len(assigned) != 1 or name in self._changed_elsewhere:
            return None
        is_certain = not assigned[0].is_appended and not assigned[0].command.is_conditional
        return assigned[0] if is_certain else None

    def _list_in(self, word: Word) -> Sequence[Word] | None:
        """The words of `"${NAME[@]}"`, or of `$NAME` without quotes, if they are known."""
        if len(word.pieces) != 1:
            return None
        piece = word.pieces[0]
        assignment = self._only_assignment(piece.text)
        if assignment is None:
            return None
        if piece.kind is Kind.ARRAY:
            return assignment.items
        if piece.kind is not Kind.VARIABLE or piece.is_quoted or assignment.items is not None:
            return None
        inside = inside_quotes(self.text, assignment.value)
        if inside is None:
            return None
        # A newline in a value is a blank.
        return [inner for command in read_commands(self.text, *inside) for inner in command.words]

    def _assignments(self, command: Command) -> Iterator[Assignment]:
        words = command.words
        leading = 0
        while leading < len(words) and ASSIGNMENT.match(
            self.text, words[leading].start, words[leading].end
        ):
            leading += 1
        for word in words[:leading]:
            yield self._assignment(word, command, leading < len(words), leading < len(words))
        rest = words[leading:]
        first = rest[0].plain if rest else None
        if first in _DECLARES:
            is_exported = first == "export" or _exports(command)
            yield from (
                self._assignment(word, command, is_exported, False)
                for word in rest[1:]
                if ASSIGNMENT.match(self.text, word.start, word.end)
            )
        elif first == "env":
            yield from self._given_by_env(command, rest[1:])

    def _given_by_env(self, command: Command, words: Sequence[Word]) -> Iterator[Assignment]:
        for word in words:
            if ASSIGNMENT.match(self.text, word.start, word.end):
                yield self._assignment(word, command, True, True)
            elif not word.head.startswith("-"):
                return

    def _assignment(
        self, word: Word, command: Command, is_exported: bool, is_for_command: bool
    ) -> Assignment:
        written = self.text[word.start : min(word.end, word.start + 200)]
        name, _, _ = written.partition("=")
        return Assignment(
            name=re.split(r"[+\[]", name, maxsplit=1)[0],
            value=word.behind(len(name) + 1),
            command=command,
            is_exported=is_exported,
            is_for_command=is_for_command,
            is_appended=name.endswith(("+", "]")),
            items=word.items,
            start=word.start,
            end=word.end,
        )


def _is_script(text: str, heredoc: re.Match[str]) -> bool:
    line = text[text.rfind("\n", 0, heredoc.start()) + 1 : heredoc.start()]
    is_run = re.search(r"(?:^|[\s/;&|])(?:sbatch|srun|ssh|bash|sh)\b", line) is not None
    return is_run or heredoc["body"].startswith("#!") or "\n#SBATCH" in heredoc["body"]


def _alone(text: str, heredoc: re.Match[str]) -> str:
    """The blanks for `\\` are at the beginning of a line, since its end may continue it."""
    lines = heredoc["body"].split("\n")
    if not heredoc["quote"]:
        lines = [line.replace("\\$", "$").rjust(len(line)) for line in lines]
    before = re.sub(r"[^\r\n]", " ", text[: heredoc.start("body")])
    return before + "\n".join(lines)


_OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _calculated(expression: str) -> str | None:
    """The value of an expression of whole numbers."""
    if not re.fullmatch(r"[\d\s+*/%()-]{1,200}", expression):
        return None
    try:
        value = _result(ast.parse(expression.strip().replace("/", "//"), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None
    return str(value) if 0 <= value < 10**9 else None


def _result(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_result(node.left), _result(node.right))
    raise ValueError


def _exports(command: Command) -> bool:
    """`declare -x` and `typeset -x`."""
    words = [word.plain or "" for word in command.words]
    return words[0] in {"declare", "typeset"} and any(
        re.fullmatch(r"-\w*x\w*", word) for word in words[1:]
    )

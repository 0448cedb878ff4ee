"""The launches in a script: torchrun and others, also after srun, ssh, env or `bash -c "..."`, with
torchrun's flags."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

from drumline_lint.reading.shell import Script
from drumline_lint.reading.shell_parser import (
    ASSIGNMENT,
    Command,
    Kind,
    Word,
    inside_quotes,
    read_commands,
)
from drumline_lint.reading.slurm import Options, read_options

VALUED = tuple(
    "duplicate-stderr-filters duplicate-stdout-filters event-log-handler local-addr local-ranks-filter "
    "log-dir logs-specs master-addr master-port max-restarts monitor-interval nnodes node-rank "
    "nproc-per-node numa-binding rdzv-backend rdzv-conf rdzv-endpoint rdzv-id redirects role "
    "shutdown-timeout signals-to-handle start-method tee".split()
)
BARE = ("help", "module", "no-python", "run-path", "standalone", "use-env", "virtual-local-rank")
SHORT = {"-h": "help", "-m": "module", "-r": "redirects", "-t": "tee"}


@dataclass(frozen=True, slots=True)
class Flag:
    """One of the launcher's own flags."""

    name: str
    word: Word
    value: Word | None
    """Its value: the part after an equals sign, or the next word."""


def read_flags(words: Sequence[Word]) -> tuple[dict[str, Flag], bool]:
    """torchrun's flags, and whether these are certainly all."""
    flags: dict[str, Flag] = {}
    position = 0
    while position < len(words):
        word = words[position]
        head = word.head
        if not head:
            return flags, _is_last_of_flags(word, words[position + 1 :])
        if not head.startswith("-") or word.plain == "--":
            return flags, True
        name, equals, _ = head.partition("=")
        flag = _known(name)
        if not flag:
            return flags, False
        value: Word | None = None
        if equals:
            value = word.behind(len(name) + 1)
        elif flag in VALUED:
            position += 1
            value = words[position] if position < len(words) else None
        flags[flag] = Flag(flag, word, value)
        position += 1
    return flags, True


def _is_last_of_flags(word: Word, rest: Sequence[Word]) -> bool:
    """Whether an unknown word must be the script: it is one word, and no known flag follows."""
    if not word.pieces or not word.pieces[0].is_quoted or word.pieces[0].kind is not Kind.VARIABLE:
        return False
    return not any(
        _known(later.head.partition("=")[0]) for later in rest if later.head.startswith("--")
    )


def _known(written: str) -> str:
    """The flag that is meant; empty if it is none or could be two."""
    if written in SHORT:
        return SHORT[written]
    name = written.removeprefix("--").replace("_", "-")
    if not written.startswith("--") or not name:
        return ""
    if name in VALUED or name in BARE:
        return name
    meant = [flag for flag in (*VALUED, *BARE) if flag.startswith(name)]
    return meant[0] if len(meant) == 1 else ""


TORCHRUN = "torchrun"
OLD_LAUNCH = "torch.distributed.launch"
PYTHON = "python"
_STEPPED_OVER = set("nohup exec time command env nice ionice sudo stdbuf setsid eval".split())
_WITH_OPTIONS = set(
    "apptainer conda docker enroot micromamba mpiexec mpirun numactl pdsh pixi poetry podman singularity "
    "ssh taskset timeout uv".split()
)
_ELSEWHERE = {"mpiexec", "mpirun", "pdsh", "ssh"}
_SHELLS = {"bash", "sh", "zsh", "dash"}
_PYTHON_NAME = re.compile(r"python[0-9.]*")
_DEEPEST = 4
# Cached, because every rule needs it.
_FOUND: WeakKeyDictionary[Script, list[Launch]] = WeakKeyDictionary()


@dataclass(frozen=True)
class _LaunchContext:
    """What comes before a launcher."""

    command: Command
    """The outermost command, as it is in the script."""
    srun: Options | None = None
    is_elsewhere: bool = False
    """Whether it is run by ssh, mpirun or the like."""
    depth: int = 0


@dataclass(frozen=True)
class Launch(_LaunchContext):
    """One start of a training script, by a launcher or by Python itself."""

    kind: str = ""
    name: tuple[Word, ...] = ()
    """The words that name it: `torchrun`, or `python -m torch.distributed.run`."""
    flags: Mapping[str, Flag] = field(default_factory=dict)
    is_sure: bool = True
    """Whether these are certainly all flags."""

    @property
    def is_torchrun(self) -> bool:
        return self.kind in {TORCHRUN, OLD_LAUNCH}


def launches(script: Script) -> list[Launch]:
    """All launches of a script, in order."""
    if script not in _FOUND:
        _FOUND[script] = [
            launch
            for command in script.commands
            for launch in _in_words(script, command.words, _LaunchContext(command))
        ]
    return _FOUND[script]


def _in_words(script: Script, written: Sequence[Word], around: _LaunchContext) -> Iterator[Launch]:
    words = list(script.expanded(written))
    position = 0
    while position < len(words):
        word = words[position]
        name = _base(word)
        if ASSIGNMENT.match(script.text, word.start, word.end):
            position += 1
        elif name in _STEPPED_OVER:
            position += 1
            while position < len(words) and _is_option(words[position]):  # `-n 10`
                position += 1
        elif name == "srun":
            options, num_taken, is_sure = read_options(words[position + 1 :], script.constant)
            around = replace(around, srun=Options(options, is_sure))
            position += 1 + num_taken
        elif name in _WITH_OPTIONS:
            around = replace(around, is_elsewhere=around.is_elsewhere or name in _ELSEWHERE)
            yield from _in_quoted(script, words[position + 1 :], around)
            position += 1
            while position < len(words) and not _is_program(_base(words[position])):
                position += 1
        elif name in _SHELLS:
            arguments = [word.plain or "" for word in words[position + 1 :]]
            after = next(
                (
                    number
                    for number, argument in enumerate(arguments)
                    if re.fullmatch(r"-\w*c", argument)
                ),
                len(arguments),
            )
            if all(argument.startswith("-") for argument in arguments[:after]):
                yield from _in_quoted(
                    script, words[position + after + 2 : position + after + 3], around
                )
            return
        else:
            yield from _launch(script, words[position:], around)
            return


def _base(word: Word) -> str:
    return (word.plain or "").rsplit("/", 1)[-1]


def _is_option(word: Word) -> bool:
    return word.head.startswith("-") or re.fullmatch(r"[0-9]+", word.plain or "") is not None


def _is_program(name: str) -> bool:
    return name in {"torchrun", "srun"} | _SHELLS or _PYTHON_NAME.fullmatch(name) is not None


def _in_quoted(script: Script, words: Sequence[Word], around: _LaunchContext) -> Iterator[Launch]:
    """`bash -c "..."`, `ssh host '...'`."""
    if around.depth >= _DEEPEST:
        return
    deeper = replace(around, depth=around.depth + 1)
    for word in words:
        inside = inside_quotes(script.text, word)
        if inside is not None and any(letter.isspace() for letter in script.text[slice(*inside)]):
            for command in read_commands(script.text, *inside):
                yield from _in_words(script, command.words, deeper)


def _launch(script: Script, words: Sequence[Word], around: _LaunchContext) -> Iterator[Launch]:
    kind, length = _kind(words)
    if kind:
        flags, is_sure = read_flags(words[length:] if kind in {TORCHRUN, OLD_LAUNCH} else ())
        yield Launch(
            command=around.command,
            srun=around.srun,
            is_elsewhere=around.is_elsewhere,
            kind=kind,
            name=tuple(words[:length]),
            flags=flags,
            is_sure=is_sure and not script.has_flags_in_variables,
        )


def _kind(words: Sequence[Word]) -> tuple[str, int]:
    """What is started, and how many words name it."""
    first = _base(words[0])
    if first == "torchrun":
        return TORCHRUN, 1
    if not _PYTHON_NAME.fullmatch(first) and not _is_python_variable(words[0]):
        return "", 0
    for position, word in enumerate(words[1:], start=1):
        option = word.plain or ""
        module = words[position + 1].plain if position + 1 < len(words) else None
        if option == "-m" and module in {"torch.distributed.run", "torch.distributed.launch"}:
            return (TORCHRUN if module == "torch.distributed.run" else OLD_LAUNCH), position + 2
        if not option.startswith("-") or option in {"-m", "-c"}:
            break
    return PYTHON, 1


def _is_python_variable(word: Word) -> bool:
    """`$PYTHON`, `${PYTHON_BIN}`."""
    pieces = word.pieces
    return (
        len(pieces) == 1 and pieces[0].kind is Kind.VARIABLE and "PYTHON" in pieces[0].text.upper()
    )

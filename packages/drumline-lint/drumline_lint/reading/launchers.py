"""The launches in a script: torchrun and others, behind srun, ssh, env or `bash -c "..."`, with torchrun's flags."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

from drumline_lint.reading.shell import Script
from drumline_lint.reading.shell_parser import ASSIGNMENT, Command, Kind, Word, inside_quotes, read_commands
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
    """What it is given; the part behind an equals sign, or the next word."""


def read_flags(words: Sequence[Word]) -> tuple[dict[str, Flag], bool]:
    """torchrun's flags, and whether there can be no others."""
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
        known = _known(name)
        if not known:
            return flags, False
        value: Word | None = None
        if equals:
            value = _behind_equals(word, len(name) + 1)
        elif known in VALUED:
            position += 1
            value = words[position] if position < len(words) else None
        flags[known] = Flag(known, word, value)
        position += 1
    return flags, True


def _is_last_of_flags(word: Word, rest: Sequence[Word]) -> bool:
    """Whether a word that is not known can only be the script: it is one word, and none of our flags follows."""
    first = word.pieces[0] if word.pieces else None  # a quote that was never closed may hold nothing
    if first is None or not first.is_quoted or first.kind is not Kind.VARIABLE:
        return False
    return not any(_known(later.head.partition("=")[0]) for later in rest if later.head.startswith("--"))


def _known(written: str) -> str:
    """The flag that is meant; nothing where it is none or could be two."""
    if written in SHORT:
        return SHORT[written]
    name = written.removeprefix("--").replace("_", "-")
    if not written.startswith("--") or not name:
        return ""
    if name in VALUED or name in BARE:
        return name
    meant = [known for known in (*VALUED, *BARE) if known.startswith(name)]
    return meant[0] if len(meant) == 1 else ""


def _behind_equals(word: Word, length: int) -> Word:
    first = word.pieces[0]._replace(text=word.pieces[0].text[length:])
    pieces = (first, *word.pieces[1:]) if first.text or len(word.pieces) == 1 else word.pieces[1:]
    return Word(word.start + length, word.end, pieces)


TORCHRUN, OLD_LAUNCH, ACCELERATE, PYTHON = ("torchrun", "torch.distributed.launch", "accelerate launch", "python")
_STEPPED_OVER = set("nohup exec time command env nice ionice sudo stdbuf setsid eval".split())
_WITH_OPTIONS = set(
    "apptainer conda docker enroot micromamba mpiexec mpirun numactl pdsh pixi poetry podman singularity "
    "ssh taskset timeout uv".split()
)
_ELSEWHERE = {"mpiexec", "mpirun", "pdsh", "ssh"}
_SHELLS = {"bash", "sh", "zsh", "dash"}
_DEEPEST = 4
# Every rule asks, and the answer stays as long as the script does.
_FOUND: WeakKeyDictionary[Script, list[Launch]] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One start of a training script, by a launcher or by Python itself."""

    kind: str
    command: Command
    """The outermost, as it stands in the script."""
    words: tuple[Word, ...]
    """The launcher, from its name on, with its flags and what it runs."""
    name: tuple[Word, ...]
    """Those that name it: `torchrun`, or `python -m torch.distributed.run`."""
    flags: Mapping[str, Flag] = field(default_factory=dict)
    is_sure: bool = True
    """Whether there can be no other flags."""
    srun: Options | None = None
    srun_word: Word | None = None
    is_elsewhere: bool = False
    """Behind ssh, mpirun and the like."""
    is_expanded_late: bool = False
    """In single quotes: its variables get their values where it runs."""

    @property
    def is_torchrun(self) -> bool:
        return self.kind in {TORCHRUN, OLD_LAUNCH}


@dataclass(frozen=True)
class _LaunchContext:
    """What stands before a launcher."""

    command: Command
    srun: Options | None = None
    srun_word: Word | None = None
    is_elsewhere: bool = False
    is_expanded_late: bool = False
    depth: int = 0


def launches(script: Script) -> list[Launch]:
    """All that a script starts, in order."""
    if script not in _FOUND:
        _FOUND[script] = [
            launch
            for command in script.commands
            for launch in _in_words(script, command.words, _LaunchContext(command))
        ]
    return _FOUND[script]


def _in_words(script: Script, given: Sequence[Word], around: _LaunchContext) -> Iterator[Launch]:
    words = list(script.expanded(given))
    position = 0
    while position < len(words):
        word = words[position]
        name = _base(word)
        if ASSIGNMENT.match(script.text, word.start, word.end):
            position += 1
        elif name in _STEPPED_OVER:
            position = _behind_options(words, position + 1)
        elif name == "srun":
            position, around = _behind_srun(script, words, position, around)
        elif name in _WITH_OPTIONS:
            around = replace(around, is_elsewhere=around.is_elsewhere or name in _ELSEWHERE)
            yield from _in_quoted(script, words[position + 1 :], around)
            position = _next_program(words, position + 1)
        elif name in _SHELLS:
            yield from _in_shell(script, words[position + 1 :], around)
            return
        else:
            yield from _launch(script, words[position:], around)
            return


def _base(word: Word) -> str:
    return (word.plain or "").rsplit("/", 1)[-1]


def _behind_options(words: Sequence[Word], position: int) -> int:
    """Past `-n 10` and the like."""
    while position < len(words) and (
        words[position].head.startswith("-") or re.fullmatch(r"[0-9]+", words[position].plain or "")
    ):
        position += 1
    return position


def _behind_srun(
    script: Script, words: Sequence[Word], position: int, around: _LaunchContext
) -> tuple[int, _LaunchContext]:
    found, taken, is_sure = read_options(words[position + 1 :], script.constant)
    options = Options({option.name: option for option in found}, is_sure)
    return position + 1 + taken, replace(around, srun=options, srun_word=words[position])


def _next_program(words: Sequence[Word], position: int) -> int:
    while position < len(words) and not _is_program(_base(words[position])):
        position += 1
    return position


def _is_program(name: str) -> bool:
    return name in {"torchrun", "accelerate", "srun"} | _SHELLS or _is_python(name)


def _is_python(name: str) -> bool:
    return re.fullmatch(r"python[0-9.]*", name) is not None


def _in_shell(script: Script, words: Sequence[Word], around: _LaunchContext) -> Iterator[Launch]:
    """`bash -c "..."`."""
    for position, word in enumerate(words):
        option = word.plain or ""
        if re.fullmatch(r"-\w*c", option):
            yield from _in_quoted(script, words[position + 1 : position + 2], around)
            return
        if not option.startswith("-"):
            return


def _in_quoted(script: Script, words: Sequence[Word], around: _LaunchContext) -> Iterator[Launch]:
    if around.depth >= _DEEPEST:
        return
    for word in words:
        inside = inside_quotes(script.text, word)
        if inside is None or not any(letter.isspace() for letter in script.text[slice(*inside)]):
            continue
        is_late = around.is_expanded_late or script.text[word.start] == "'"
        deeper = replace(around, depth=around.depth + 1, is_expanded_late=is_late)
        for command in read_commands(script.text, *inside):
            yield from _in_words(script, command.words, deeper)


def _launch(script: Script, words: Sequence[Word], around: _LaunchContext) -> Iterator[Launch]:
    kind, length = _kind(words)
    if not kind:
        return
    flags, is_sure = read_flags(words[length:] if kind in {TORCHRUN, OLD_LAUNCH} else ())
    yield Launch(
        kind=kind,
        command=around.command,
        words=tuple(words),
        name=tuple(words[:length]),
        flags=flags,
        is_sure=is_sure and not script.has_flags_in_variables,
        srun=around.srun,
        srun_word=around.srun_word,
        is_elsewhere=around.is_elsewhere,
        is_expanded_late=around.is_expanded_late,
    )


def _kind(words: Sequence[Word]) -> tuple[str, int]:
    first, second = _base(words[0]), words[1].plain if len(words) > 1 else None
    if first == "torchrun":
        return TORCHRUN, 1
    if first == "accelerate" and second == "launch":
        return ACCELERATE, 2
    if not _is_python(first) and not _is_python_variable(words[0]):
        return "", 0
    for position, word in enumerate(words[1:], start=1):
        option = word.plain or ""
        module = words[position + 1].plain if position + 1 < len(words) else None
        if option == "-m" and module in {"torch.distributed.run", "torch.distributed.launch"}:
            return (TORCHRUN if module == "torch.distributed.run" else OLD_LAUNCH), position + 2
        if option == "-m" and module and module.startswith("accelerate.commands.launch"):
            return ACCELERATE, position + 2
        if not option.startswith("-") or option in {"-m", "-c"}:
            break
    return PYTHON, 1


def _is_python_variable(word: Word) -> bool:
    """`$PYTHON`, `${PYTHON_BIN}`."""
    pieces = word.pieces
    return len(pieces) == 1 and pieces[0].kind is Kind.VARIABLE and "PYTHON" in pieces[0].text.upper()

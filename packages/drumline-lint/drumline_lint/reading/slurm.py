"""Options of sbatch and srun: long and short, with `=` or a blank, in a header or on a command
line."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from drumline_lint.reading.shell_parser import Word, read_commands

SHORT = {
    pair[0]: pair[2:]
    for pair in "A=account B=extra-node-info C=constraint D=chdir G=gpus J=job-name L=licenses M=clusters N=nodes "
    "S=core-spec T=threads a=array b=begin c=cpus-per-task d=dependency e=error i=input m=distribution n=ntasks "
    "o=output p=partition q=qos r=relative t=time w=nodelist x=exclude".split()
}
# These take a value only after an equals sign, or none.
ALONE = set(
    "async bcast compress contiguous disable-status exact exclusive external-launcher get-user-env hold "
    "immediate kill-on-bad-exit label multi-prog nice no-allocate no-kill no-requeue oom-kill-step "
    "overcommit overlap oversubscribe parsable preserve-env propagate pty quiet quit-on-interrupt reboot "
    "requeue resv-ports send-libs share spread-job stepmgr test-only unbuffered use-min-nodes verbose "
    "wait-for-children whole x11".split()
)
ALIASES = {"tasks-per-node": "ntasks-per-node"}
# As sbatch finds them: at the beginning of a line, with or without a blank after it.
_HEADER = re.compile(r"^#SBATCH(?=[ \t-])", re.MULTILINE)
# sbatch stops reading there.
_COMMAND = re.compile(r"^[ \t]*(?![ \t\r]|#)[^\n]+", re.MULTILINE)
# With --exclusive=user or =mcs, other jobs of the same user or group may run on its nodes.
_WHOLE = {None, "allocation", "exclusive", "topo"}
# The number of GPUs that a whole node usually has; a job with several nodes seldom uses only some
# of each.
_ALL_GPUS = 8
_ALL_GPUS_OF_SEVERAL = 4


@dataclass(frozen=True, slots=True)
class Option:
    """One option, by its long name."""

    name: str
    value: str | None
    """None if it has no value, or one that is known only at run time."""
    word: Word


@dataclass(frozen=True)
class Options:
    """All options of a header, or of an srun."""

    by_name: Mapping[str, Option] = field(default_factory=dict)
    is_sure: bool = True
    """Whether these are certainly all: none comes from an unknown variable."""

    def __contains__(self, name: str) -> bool:
        return name in self.by_name

    def number(self, name: str) -> int | None:
        option = self.by_name.get(name)
        value = option.value if option else None
        return int(value) if value and re.fullmatch(r"[0-9]{1,6}", value) else None

    @property
    def gpus_per_node(self) -> int | None:
        found = self.number("gpus-per-node") or _gpus(self.by_name.get("gres"))
        if found is None and "gpus-per-node" in self:
            found = _gpus(self.by_name["gpus-per-node"], prefix="")
        return found

    @property
    def has_whole_nodes(self) -> bool:
        """Whether no other job runs on its nodes: they are exclusive, or all their GPUs are
        used."""
        is_alone = "exclusive" in self and self.by_name["exclusive"].value in _WHOLE
        memory = self.by_name.get("mem")
        takes_memory = memory is not None and memory.value == "0"
        has_several = (self.number("nodes") or 1) > 1
        takes_gpus = (self.gpus_per_node or 0) >= (
            _ALL_GPUS_OF_SEVERAL if has_several else _ALL_GPUS
        )
        return is_alone or takes_memory or takes_gpus


def _gpus(option: Option | None, prefix: str = "gpu:") -> int | None:
    """`gpu:8`, `gpu:a100:8`; without the prefix, `a100:8`."""
    if option is None or option.value is None:
        return None
    found = re.fullmatch(rf"{prefix}(?:[A-Za-z0-9_.-]+:)?([0-9]{{1,4}})", option.value)
    return int(found[1]) if found else None


def header_options(text: str) -> Options:
    """The options of the `#SBATCH` lines, which end at the first command."""
    options: dict[str, Option] = {}
    first = _COMMAND.search(text)
    end = first.start() if first else len(text)
    for found in _HEADER.finditer(text, 0, end):
        line_end = text.find("\n", found.end()) + 1 or len(text)
        words = [
            word for command in read_commands(text, found.end(), line_end) for word in command.words
        ]
        options |= {
            option.name: option for option in read_options(words, lambda word: word.plain)[0]
        }
    return Options(options)


def read_options(
    words: Sequence[Word], value_of: Callable[[Word], str | None]
) -> tuple[list[Option], int, bool]:
    """The options that words begin with, how many words they are, and whether all could be read."""
    options = []
    position = 0
    is_sure = True
    while position < len(words):
        word = words[position]
        head = word.head
        if not word.pieces or not head:
            is_sure = False
        elif not head.startswith("-") or head == "-":
            break
        else:
            option, taken = _option(word, words[position + 1 : position + 2], value_of)
            options += option
            position += taken
        position += 1
    return options, position, is_sure


def _option(
    word: Word, following: Sequence[Word], value_of: Callable[[Word], str | None]
) -> tuple[list[Option], int]:
    whole = value_of(word)
    head = whole if whole is not None else word.head
    if head.startswith("--"):
        name, equals, value = head[2:].partition("=")
        name = ALIASES.get(name, name)
        if equals:
            return [Option(name, value if whole is not None else None, word)], 0
        takes = name not in ALONE
    else:
        name = SHORT.get(head[1:2], "")
        value = head[2:]
        if not name:
            return [], 0
        if value or whole is None:
            return [Option(name, value.removeprefix("=") if whole is not None else None, word)], 0
        takes = True
    if not takes or not following:
        return [Option(name, None, word)], 0
    return [Option(name, value_of(following[0]), word)], 1

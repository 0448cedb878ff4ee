"""Options of sbatch and srun: long and short, with `=` or a blank, in a header or on a command
line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from drumline_lint.reading.shell_parser import Word

# The long name by the letter: `-N 2` is `--nodes=2`.
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
# As sbatch finds them: at the beginning of a line, with or without a blank after it.
_HEADER = re.compile(r"^#SBATCH(?=[ \t-])(.*)", re.MULTILINE)
# What a script writes to another file.
_HEREDOC = re.compile(
    r"<<-?[ \t]*(?P<quote>['\"]?)(?P<end>\w+)(?P=quote)[^\n]*\n(?:.*?\n)??[ \t]*(?P=end)[ \t\r]*$",
    re.DOTALL | re.MULTILINE,
)
# sbatch stops reading there.
_COMMAND = re.compile(r"^[ \t]*(?![ \t\r]|#)[^\n]+", re.MULTILINE)
# With --exclusive=user or =mcs, other jobs of the same user or group may run on its nodes.
_WHOLE = {None, "allocation", "exclusive", "topo"}
# The number of GPUs that a whole node usually has, at least; the tasks of an array are there
# together.
_ALL_GPUS = 4
_ALL_GPUS_OF_ARRAY = 8


@dataclass(frozen=True)
class Options:
    """All options of a header, or of an srun."""

    by_name: Mapping[str, str | None] = field(default_factory=dict)
    """By its long name; None if it has no value, or one that is known only at run time."""
    is_sure: bool = True
    """Whether these are certainly all: none comes from an unknown variable."""

    def number(self, name: str) -> int | None:
        return whole_number(self.by_name.get(name))

    @property
    def gpus_per_node(self) -> int | None:
        """`--gpus-per-node=8`, or `a100:8`; `--gres=gpu:8`, or `gpu:a100:8`."""
        gres = self.by_name.get("gres") or ""
        if not gres.startswith("gpu:"):
            gres = ""  # another resource

        for value in (self.by_name.get("gpus-per-node") or "", gres):
            count = whole_number(value.rpartition(":")[2])
            if count is not None:
                return count

        return None

    @property
    def has_whole_nodes(self) -> bool:
        """Whether no other job runs on its nodes: they are exclusive, or all their GPUs are
        used."""
        if "exclusive" in self.by_name and self.by_name["exclusive"] in _WHOLE:
            return True
        if self.by_name.get("mem") == "0" or self.by_name.get("gpus-per-task") == "8":
            return True

        all_gpus = _ALL_GPUS_OF_ARRAY if "array" in self.by_name else _ALL_GPUS
        return (self.gpus_per_node or 0) >= all_gpus


def whole_number(text: str | None) -> int | None:
    """The number that a text is; None for anything else, and for more than six digits."""
    return int(text) if text and re.fullmatch(r"[0-9]{1,6}", text) else None


@dataclass(frozen=True)
class HeaderLine:
    """One `#SBATCH` line."""

    start: int
    end: int
    text: str
    is_late: bool
    """Whether a command comes before it, so that sbatch does not read it."""


def header_lines(text: str) -> list[HeaderLine]:
    """The `#SBATCH` lines, without those that a script writes to another file."""
    own_text = _HEREDOC.sub(lambda heredoc: " " * len(heredoc[0]), text)
    first_command = _COMMAND.search(own_text)
    end = first_command.start() if first_command else len(text)

    return [
        HeaderLine(line.start(), line.end(), line[1], line.start() > end)
        for line in _HEADER.finditer(own_text)
    ]


def header_options(text: str) -> Options:
    """The options of the `#SBATCH` lines, which end at the first command."""
    options: dict[str, str | None] = {}
    if "#SBATCH" not in text:
        return Options(options)

    for line in header_lines(text):
        if line.is_late:
            break
        with suppress(ValueError):  # A quote that is not closed.
            words = [Word(0, 0, word) for word in shlex.split(line.text, comments=True)]
            options |= read_options(words, lambda word: word.plain)[0]

    return Options(options)


def read_options(
    words: Sequence[Word], value_of: Callable[[Word], str | None]
) -> tuple[dict[str, str | None], int, bool]:
    """The options that words begin with, how many words they are, and whether all could be read.

    For `-N 2 --gres=gpu:8 $MORE python train.py` these are nodes and gres, 4 words, and False.
    """
    options: dict[str, str | None] = {}
    position = 0
    is_sure = True

    while position < len(words):
        head = words[position].head
        if head and (not head.startswith("-") or head == "-"):
            break

        text = value_of(words[position])
        position += 1
        if not head:
            is_sure = False
            continue

        name, value = _name_and_value(text or head)
        if value is None and name and name not in ALONE and position < len(words):
            options[name] = value_of(words[position])
            position += 1
        else:
            options[name] = None if text is None else value

    options.pop("", None)
    if "tasks-per-node" in options:
        options["ntasks-per-node"] = options.pop("tasks-per-node")

    return options, position, is_sure


def _name_and_value(option: str) -> tuple[str, str | None]:
    """The long name and the value of `--nodes=2`, `-N2`, `-N=2`; None for a value that is not in the
    same word."""
    if option.startswith("--"):
        name, equals, value = option[2:].partition("=")
        return name, value.removeprefix("=") if equals else None

    value = option[2:]
    return SHORT.get(option[1], ""), value.removeprefix("=") if value else None

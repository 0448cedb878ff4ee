"""Options of sbatch and srun: long and short, with `=` or a blank, in a header or on a command
line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from drumline_lint.reading.shell_parser import Kind, Piece, Word

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
_OTHER_LONG_OPTIONS = (
    "acctg-freq batch bb bbf burst-buffer cluster-constraint comment container container-id "
    "cores-per-socket cpu-bind cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot epilog "
    "export export-file extra gid gpu-bind gpu-freq gpus-per-node gpus-per-socket "
    "gpus-per-task gres gres-flags help hint ignore-pbs jobid kill-on-invalid-dep mail-type "
    "mail-user max-time mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus mpi network "
    "nodefile ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket open-mode "
    "power prefer priority profile prolog reservation resv signal sockets-per-node switches "
    "task-epilog task-prolog tasks-per-node thread-spec threads-per-core time-min tmp "
    "tres-bind tres-per-task uid usage version wait wckey wrap"
)
LONG_OPTIONS = frozenset({*SHORT.values(), *ALONE, *_OTHER_LONG_OPTIONS.split()})
"""Of sbatch and srun, without those of plugins."""
ALIASES = {"tasks-per-node": "ntasks-per-node"}
# As sbatch finds them: at the beginning of a line, with or without a blank after it.
_HEADER = re.compile(r"^#SBATCH(?=[ \t-])(.*)", re.MULTILINE)
_LONG_OPTION = re.compile(r"[ \t]*--([A-Za-z][A-Za-z0-9-]*)")
# What a script writes to another file.
HEREDOC = re.compile(
    r"<<-?[ \t]*(?P<quote>['\"]?)(?P<end>\w+)(?P=quote)[^\n]*\n(?P<body>(?:.*?\n)??)[ \t]*(?P=end)[ \t\r]*$",
    re.DOTALL | re.MULTILINE,
)
# sbatch stops reading there.
_COMMAND = re.compile(r"^[ \t]*(?![ \t\r]|#)[^\n]+", re.MULTILINE)
# With --exclusive=user or =mcs, other jobs of the same user or group may run on its nodes.
_WHOLE = {None, "allocation", "exclusive", "topo"}
# The number of GPUs that a whole node usually has, at least; the tasks of an array are there
# together.
ALL_GPUS = 4
_ALL_GPUS_OF_ARRAY = 8


@dataclass(frozen=True)
class Options:
    """All options of a header, or of an srun."""

    by_name: Mapping[str, str | None] = field(default_factory=dict)
    """By its long name; None if it has no value, or one that is known only at run time."""
    is_sure: bool = True
    """Whether these are certainly all: none comes from an unknown variable."""

    def number(self, name: str) -> int | None:
        value = self.by_name.get(name)
        return int(value) if value and re.fullmatch(r"[0-9]{1,6}", value) else None

    @property
    def gpus_per_node(self) -> int | None:
        """`--gpus-per-node=8`, or `a100:8`; `--gres=gpu:8`, or `gpu:a100:8`."""
        for name, prefix in (("gpus-per-node", ""), ("gres", "gpu:")):
            pattern = rf"{prefix}(?:[A-Za-z0-9_.-]+:)?([0-9]{{1,4}})"
            if count := re.fullmatch(pattern, self.by_name.get(name) or ""):
                return int(count[1])
        return None

    @property
    def has_whole_nodes(self) -> bool:
        """Whether no other job runs on its nodes: they are exclusive, or all their GPUs are
        used."""
        is_alone = "exclusive" in self.by_name and self.by_name["exclusive"] in _WHOLE
        is_array = "array" in self.by_name
        all_gpus = _ALL_GPUS_OF_ARRAY if is_array else ALL_GPUS
        return is_alone or self.by_name.get("mem") == "0" or (self.gpus_per_node or 0) >= all_gpus


def header_options(text: str) -> Options:
    """The options of the `#SBATCH` lines, which end at the first command."""
    options: dict[str, str | None] = {}
    first_command = _COMMAND.search(text)
    end = first_command.start() if first_command else len(text)
    for header in _HEADER.finditer(text, 0, end):
        with suppress(ValueError):  # A quote that is not closed.
            texts = shlex.split(header[1], comments=True)
            words = [Word(0, 0, (Piece(Kind.TEXT, word),)) for word in texts]
            options |= read_options(words, lambda word: word.plain)[0]
    return Options(options)


@dataclass(frozen=True)
class HeaderLine:
    """One `#SBATCH` line."""

    start: int
    end: int
    text: str
    option: str
    """The name of its long option; empty if it has a short one."""
    is_late: bool
    """Whether a command comes before it, so that sbatch does not read it."""


def header_lines(text: str) -> list[HeaderLine]:
    """The `#SBATCH` lines, without those that a script writes to another file."""
    first_command = _COMMAND.search(text)
    end = first_command.start() if first_command else len(text)
    written = [heredoc.span() for heredoc in HEREDOC.finditer(text)]
    lines = []
    for header in _HEADER.finditer(text):
        if any(start < header.start() < stop for start, stop in written):
            continue
        option = _LONG_OPTION.match(header[1])
        is_late = header.start() > end
        code = header[1].partition(" #")[0]
        name = option[1] if option else ""
        lines.append(HeaderLine(header.start(), header.end(), code, name, is_late))
    return lines


def read_options(
    words: Sequence[Word], value_of: Callable[[Word], str | None]
) -> tuple[dict[str, str | None], int, bool]:
    """The options that words begin with, how many words they are, and whether all could be read."""
    options: dict[str, str | None] = {}
    position = 0
    is_sure = True
    while position < len(words):
        word = words[position]
        position += 1
        if not word.head:
            is_sure = False
            continue
        if not word.head.startswith("-") or word.head == "-":
            return options, position - 1, is_sure
        name, value, takes_next = _option(word, value_of(word))
        if takes_next and position < len(words):
            value = value_of(words[position])
            position += 1
        if name:
            options[name] = value
    return options, position, is_sure


def _option(word: Word, text: str | None) -> tuple[str, str | None, bool]:
    """Its long name, its value, and whether the next word is its value."""
    head = word.head if text is None else text
    if head.startswith("--"):
        written, equals, value = head[2:].partition("=")
        name = ALIASES.get(written, written)
        is_whole = bool(equals) or name in ALONE
    else:
        name = SHORT.get(head[1:2], "")
        value = head[2:].removeprefix("=")
        equals = head[2:]
        is_whole = not name or bool(equals) or text is None
    return name, value if equals and text is not None else None, not is_whole

"""The launches in a script: torchrun and others, also after srun, ssh, env or `bash -c "..."`, with
their flags."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple
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


@dataclass(frozen=True)
class FlagTable:
    """The flags of a launcher, with dashes; each may be written with underscores, and abbreviated."""

    valued: tuple[str, ...]
    bare: tuple[str, ...]
    short: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.valued, *self.bare)

    def meant(self, written: str) -> str:
        """The flag that is meant; empty if it is none or could be two."""
        if written in self.short:
            return self.short[written]
        name = written.removeprefix("--").replace("_", "-")
        if not written.startswith("--") or not name:
            return ""
        if name in self.names:
            return name
        begun = [flag for flag in self.names if flag.startswith(name)]
        return begun[0] if len(begun) == 1 else ""


TORCHRUN_FLAGS = FlagTable(
    valued=tuple(
        "duplicate-stderr-filters duplicate-stdout-filters event-log-handler local-addr local-ranks-filter "
        "log-dir logs-specs master-addr master-port max-restarts monitor-interval nnodes node-rank "
        "nproc-per-node numa-binding rdzv-backend rdzv-conf rdzv-endpoint rdzv-id redirects role "
        "shutdown-timeout signals-to-handle start-method tee".split()
    ),
    bare=("help", "module", "no-python", "run-path", "standalone", "use-env", "virtual-local-rank"),
    short={"-h": "help", "-m": "module", "-r": "redirects", "-t": "tee"},
)
ACCELERATE_FLAGS = FlagTable(
    valued=tuple(
        "config-file deepspeed-config-file deepspeed-exclusion-filter deepspeed-hostfile "
        "deepspeed-inclusion-filter deepspeed-moe-layer-cls-names deepspeed-multinode-launcher dynamo-backend "
        "dynamo-mode env fp8-backend fp8-format fsdp-activation-checkpointing fsdp-auto-wrap-policy "
        "fsdp-backward-prefetch fsdp-cpu-ram-efficient-loading fsdp-forward-prefetch fsdp-min-num-params "
        "fsdp-offload-params fsdp-reshard-after-forward fsdp-sharding-strategy fsdp-state-dict-type "
        "fsdp-sync-module-states fsdp-transformer-layer-cls-to-wrap fsdp-use-orig-params fsdp-version gpu-ids "
        "gradient-accumulation-steps gradient-clipping log-dir machine-rank main-process-ip main-process-port "
        "main-training-function max-restarts mixed-precision monitor-interval mpirun-hostfile "
        "num-cpu-threads-per-process num-machines num-processes offload-optimizer-device "
        "offload-optimizer-nvme-path offload-param-device offload-param-nvme-path rdzv-backend rdzv-conf role tee "
        "vm zero-stage zero3-init-flag zero3-save-16bit-model".split()
    ),
    bare=tuple(
        "cpu debug downcast-bf16 dynamo-use-dynamic dynamo-use-fullgraph dynamo-use-regional-compilation "
        "enable-cpu-affinity help module multi-gpu no-python no-tpu-cluster quiet same-network tpu tpu-cluster "
        "tpu-use-sudo use-deepspeed use-fsdp use-megatron-lm use-parallelism-config".split()
    ),
    short={"-h": "help", "-m": "module", "-q": "quiet", "-t": "tee"},
)
DEEPSPEED_FLAGS = FlagTable(
    valued=tuple(
        "account autotuning bind-core-list comment enable-each-rank-log exclude hostfile include launcher "
        "launcher-args master-addr master-port max-elastic-nodes min-elastic-nodes node-rank "
        "num-accelerators num-gpus num-nodes ssh-port venv-script".split()
    ),
    bare=tuple(
        "bind-cores-to-rank elastic-training force-multi help module no-local-rank no-python no-ssh "
        "no-ssh-check save-pid".split()
    ),
    short={"-H": "hostfile", "-i": "include", "-e": "exclude", "-h": "help"},
)


@dataclass(frozen=True, slots=True)
class Flag:
    """One of the launcher's own flags."""

    name: str
    word: Word
    value: Word | None
    """Its value: the part after an equals sign, or the next word."""


class ReadFlags(NamedTuple):
    """What a launcher's words begin with."""

    flags: dict[str, Flag]
    is_sure: bool
    """Whether these are certainly all flags."""
    unknown: Word | None = None
    """The first flag that the launcher does not have."""
    rest: Sequence[Word] = ()
    """The training script and its arguments."""


def read_flags(words: Sequence[Word], table: FlagTable = TORCHRUN_FLAGS) -> ReadFlags:
    flags: dict[str, Flag] = {}
    position = 0
    while position < len(words):
        word = words[position]
        head = word.head
        if not head:
            is_last = _is_last_of_flags(word, words[position + 1 :], table)
            return ReadFlags(flags, is_last, rest=words[position:] if is_last else ())
        if not head.startswith("-") or word.plain == "--":
            return ReadFlags(flags, is_sure=True, rest=words[position:])
        name, equals, _ = head.partition("=")
        flag = table.meant(name)
        if not flag:
            return ReadFlags(flags, is_sure=False, unknown=word)
        value: Word | None = None
        if equals:
            value = word.behind(len(name) + 1)
        elif flag in table.valued:
            position += 1
            value = words[position] if position < len(words) else None
        flags[flag] = Flag(flag, word, value)
        position += 1
    # Without a training script, more words come from elsewhere, as for an image's entry point.
    return ReadFlags(flags, is_sure=False)


def _is_last_of_flags(word: Word, rest: Sequence[Word], table: FlagTable) -> bool:
    """Whether an unknown word must be the script: it is one word, and no known flag follows."""
    if not word.pieces or not word.pieces[0].is_quoted or word.pieces[0].kind is not Kind.VARIABLE:
        return False
    return not any(
        table.meant(later.head.partition("=")[0]) for later in rest if later.head.startswith("--")
    )


TORCHRUN = "torchrun"
OLD_LAUNCH = "torch.distributed.launch"
ACCELERATE = "accelerate launch"
DEEPSPEED = "deepspeed"
PYTHON = "python"
FLAG_TABLES = {
    TORCHRUN: TORCHRUN_FLAGS,
    OLD_LAUNCH: TORCHRUN_FLAGS,
    ACCELERATE: ACCELERATE_FLAGS,
    DEEPSPEED: DEEPSPEED_FLAGS,
}
_STEPPED_OVER = set(
    "nohup exec time command env nice ionice sudo stdbuf setsid eval tini dumb-init".split()
)
_WITH_OPTIONS = set(
    "apptainer conda docker enroot micromamba mpiexec mpirun numactl nvidia-docker pdsh pixi poetry podman "
    "singularity ssh taskset timeout uv".split()
)
_ELSEWHERE = {"mpiexec", "mpirun", "pdsh", "ssh"}
_SHELLS = {"bash", "sh", "zsh", "dash"}
_PYTHON_NAME = re.compile(r"python[0-9.]*")
_DEEPEST = 4
# Cached, because every rule needs it.
_LAUNCHES: WeakKeyDictionary[Script, list[Launch]] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class _LaunchContext:
    """What comes before a launcher."""

    command: Command
    """The outermost command, as it is in the script."""
    script: Script
    """The script, or the code in `bash -c '...'`, that gives its variables their values."""
    srun: Options | None = None
    srun_word: Word | None = None
    docker: tuple[Word, ...] = ()
    """The words of `docker run` before the launcher."""
    mpirun: tuple[Word, ...] = ()
    """The words of mpirun before the launcher."""
    apptainer: tuple[Word, ...] = ()
    """The words of `apptainer exec` before the launcher."""
    is_elsewhere: bool = False
    """Whether it is run by ssh, mpirun or the like."""
    is_expanded_late: bool = False
    """Whether the shell that expands the variables runs where the launcher runs."""
    misread: str = ""
    """Why the words are not read as they are meant; empty if they are."""
    depth: int = 0


@dataclass(frozen=True, eq=False)
class Launch(_LaunchContext):
    """One start of a training script, by a launcher or by Python itself."""

    kind: str = ""
    name: tuple[Word, ...] = ()
    """The words that name it: `torchrun`, or `python -m torch.distributed.run`."""
    flags: Mapping[str, Flag] = field(default_factory=dict)
    is_sure: bool = True
    """Whether these are certainly all flags."""
    unknown_flag: Word | None = None
    """The first flag before the training script that the launcher does not have."""
    arguments: tuple[Word, ...] = ()
    """The training script and its arguments."""

    def value(self, name: str) -> str | None:
        """The constant that a flag is given."""
        flag = self.flags.get(name)
        return self.script.constant(flag.value) if flag and flag.value else None

    def default(self, name: str) -> str | None:
        """The value of a flag where nothing outside of the script sets its variables."""
        flag = self.flags.get(name)
        return self.script.default(flag.value) if flag and flag.value else None

    @property
    def is_torchrun(self) -> bool:
        return self.kind in {TORCHRUN, OLD_LAUNCH}


def training_file(launch: Launch) -> str:
    """The Python file that it starts, as it is written; empty if it is not known."""
    words = [word.plain or "" for word in launch.arguments]
    is_module = "module" in launch.flags or words[:1] == ["-m"]
    path = next((word for word in words if not word.startswith("-")), "")
    if is_module:
        return f"{path.replace('.', '/')}.py" if path else ""
    return path.removeprefix("./") if path.endswith(".py") else ""


def launches(script: Script) -> list[Launch]:
    """All launches of a script, in order."""
    if script not in _LAUNCHES:
        _LAUNCHES[script] = [
            launch
            for command in script.commands
            for launch in _in_words(script, command.words, _LaunchContext(command, script))
        ]
    return _LAUNCHES[script]


def _in_words(script: Script, written: Sequence[Word], around: _LaunchContext) -> Iterator[Launch]:
    words = list(script.expanded(written))
    position = 0
    while position < len(words):
        word = words[position]
        name = _base(word)
        if ASSIGNMENT.match(script.text, word.start, word.end):
            position += 1
        elif not position and _is_whole_command(script, word):
            lost = "no shell splits it into words, and there is no program of that name"
            yield from _in_quoted(script, words[:1], replace(around, misread=lost))
            return
        elif name in _STEPPED_OVER:
            position += 1
            while position < len(words) and _is_option(words[position]):  # `-n 10`
                position += 1
        elif name == "srun":
            options, num_taken, is_sure = read_options(words[position + 1 :], script.constant)
            around = replace(around, srun=Options(options, is_sure), srun_word=word)
            position += 1 + num_taken
        elif name in _WITH_OPTIONS:
            around = replace(around, is_elsewhere=around.is_elsewhere or name in _ELSEWHERE)
            yield from _in_quoted(script, words[position + 1 :], around)
            first = position
            position += 1
            while position < len(words) and not _is_program(_base(words[position])):
                position += 1
            around = _with_runner(around, name, tuple(words[first:position]))
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
                yield from _in_shell(script, words[position + after + 2 :], around)
            return
        else:
            yield from _launch(script, words[position:], around)
            return


def _is_whole_command(script: Script, word: Word) -> bool:
    """`["torchrun --standalone train.py"]` in a container."""
    program, blank, _ = (word.plain or "").partition(" ")
    is_list = word.code is not None and script.container is not None and script.outer is None
    return is_list and bool(blank) and _is_program(program.rsplit("/", 1)[-1])


def _in_shell(script: Script, words: Sequence[Word], around: _LaunchContext) -> Iterator[Launch]:
    """The code of `bash -c`, which is one word; the others are $0, $1 ..."""
    if len(words) > 1 and _is_program(_base(words[0])):
        lost = f"`-c` runs {words[0].plain} alone: the words after it are not its arguments"
        yield from _launch(script, words, replace(around, misread=lost))
    else:
        yield from _in_quoted(script, words[:1], around)


def _with_runner(around: _LaunchContext, name: str, words: tuple[Word, ...]) -> _LaunchContext:
    if name in {"docker", "nvidia-docker", "podman"}:
        return replace(around, docker=words)
    if name in {"mpirun", "mpiexec"}:
        return replace(around, mpirun=words)
    if name in {"apptainer", "singularity"}:
        return replace(around, apptainer=words)
    return around


def _base(word: Word) -> str:
    return (word.plain or "").rsplit("/", 1)[-1]


def _is_option(word: Word) -> bool:
    return word.head.startswith("-") or re.fullmatch(r"[0-9]+", word.plain or "") is not None


def _is_program(name: str) -> bool:
    return (
        name in {"torchrun", "srun", "accelerate", "deepspeed"} | _SHELLS
        or _PYTHON_NAME.fullmatch(name) is not None
    )


def _in_quoted(script: Script, words: Sequence[Word], around: _LaunchContext) -> Iterator[Launch]:
    """`bash -c "..."`, `ssh host '...'`."""
    if around.depth >= _DEEPEST:
        return
    deeper = replace(around, depth=around.depth + 1)
    for word in words:
        inside = inside_quotes(script.text, word)
        if inside is None or not any(letter.isspace() for letter in script.text[slice(*inside)]):
            continue
        if script.text[word.start] == '"' and word.code is None:
            # The outer shell expands the variables, and the inner one only splits the words.
            for command in read_commands(script.text, *inside):
                is_background = deeper.command.is_background or command.is_background
                outer = replace(deeper.command, is_background=is_background)
                yield from _in_words(script, command.words, replace(deeper, command=outer))
        else:
            yield from _in_own_shell(script.inner(*inside), deeper)


def _in_own_shell(inner: Script, around: _LaunchContext) -> Iterator[Launch]:
    late = replace(around, script=inner, is_expanded_late=True)
    for command in inner.commands:
        is_background = around.command.is_background or command.is_background
        outer = command if inner.container else around.command
        outer = replace(outer, is_background=is_background)
        yield from _in_words(inner, command.words, replace(late, command=outer))


def _launch(script: Script, words: Sequence[Word], around: _LaunchContext) -> Iterator[Launch]:
    kind, length = _kind(words)
    if kind:
        table = FLAG_TABLES.get(kind)
        reading = read_flags(words[length:], table) if table else ReadFlags({}, is_sure=True)
        context = {name.name: getattr(around, name.name) for name in fields(_LaunchContext)}
        yield Launch(
            **context,
            kind=kind,
            name=tuple(words[:length]),
            flags=reading.flags,
            is_sure=reading.is_sure and not script.has_flags_in_variables,
            unknown_flag=reading.unknown,
            arguments=tuple(reading.rest if table else words[length:]),
        )


def _kind(words: Sequence[Word]) -> tuple[str, int]:
    """What is started, and how many words name it."""
    first = _base(words[0])
    if first == "torchrun":
        return TORCHRUN, 1
    if first == "deepspeed":
        return DEEPSPEED, 1
    if first == "accelerate" and len(words) > 1 and words[1].plain == "launch":
        return ACCELERATE, 2
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

"""The launches in a script: torchrun and others, also after srun, ssh, env or `bash -c "..."`, with
their flags."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

from drumline_lint.reading.shell import Script, WrittenFile
from drumline_lint.reading.shell_parser import (
    ASSIGNMENT,
    Command,
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
        """All of them, without dashes."""
        return (*self.valued, *self.bare)

    def meant(self, written: str) -> str:
        """The flag that is meant: `nproc-per-node` by `--nproc_per`; empty if it is none or could be
        two."""
        if written in self.short:
            return self.short[written]

        name = written.removeprefix("--").replace("_", "-")
        if not written.startswith("--") or not name:
            return ""
        if name in self.names:
            return name

        candidates = [flag for flag in self.names if flag.startswith(name)]
        return candidates[0] if len(candidates) == 1 else ""


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
    """What a launcher's words begin with.

    `--nnodes 2 train.py --lr 1` has the flag nnodes, and the rest `train.py --lr 1`.
    """

    flags: dict[str, Flag]
    is_sure: bool
    """Whether these are certainly all flags."""
    unknown: Word | None = None
    """The first flag that the launcher does not have."""
    rest: Sequence[Word] = ()
    """The training script and its arguments."""


def read_flags(words: Sequence[Word], table: FlagTable) -> ReadFlags:
    """The flags before the training script: up to the first word that is no flag, or that is known
    only at run time."""
    flags: dict[str, Flag] = {}
    position = 0

    while position < len(words):
        word = words[position]
        if not word.head:
            return ReadFlags(flags, is_sure=False, rest=words[position:])
        if not word.head.startswith("-") or word.plain == "--":
            return ReadFlags(flags, is_sure=True, rest=words[position:])

        name, equals, _ = word.head.partition("=")
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
# Programs that run the command behind them here: `nohup torchrun train.py`.
_STEPPED_OVER = set(
    "nohup exec time command env nice ionice sudo stdbuf setsid eval tini dumb-init".split()
)
_DOCKER = {"docker", "nvidia-docker", "podman"}
_MPIRUN = {"mpiexec", "mpirun"}
_ELSEWHERE = {*_MPIRUN, "pdsh", "ssh"}
# Programs whose options are not read: the command begins at the next program that is known.
_WITH_OPTIONS = {
    *_DOCKER,
    *_ELSEWHERE,
    *"apptainer conda enroot micromamba numactl pixi poetry singularity taskset timeout uv".split(),
}
# Options of a shell that reads its commands from its input.
_READS_INPUT = {"-s", "-e", "-l", "-x", "-se", "-ex", "--"}
_SHELLS = {"bash", "sh", "zsh", "dash"}
# `python3.11`; `$PYTHON`, `${MY_PYTHON_BIN}`.
_PYTHON_NAME = re.compile(r"python[0-9.]*")
_PYTHON_VARIABLE = re.compile(r"\$\{?\w*PYTHON\w*\}?", re.IGNORECASE)
_MODULES = {"torch.distributed.run": TORCHRUN, "torch.distributed.launch": OLD_LAUNCH}
_DEEPSPEED_CONFIG = re.compile(r"--deepspeed(?:_config)?[ =](\S+\.json)")
# How deep a command may be in quotes and files of others.
_DEEPEST = 4
# Cached, because every rule needs it.
_LAUNCHES: WeakKeyDictionary[Script, list[Launch]] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Launch:
    """One start of a training script, by a launcher or by Python itself.

    `srun -N 2 torchrun --nnodes=2 train.py --lr 1` has the kind torchrun, the flag nnodes, the
    arguments `train.py --lr 1`, and the options of srun.
    """

    command: Command
    """The outermost command, as it is in the script."""
    script: Script
    """The script, or the code in `bash -c '...'`, that gives its variables their values."""
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
    srun: Options | None = None
    srun_word: Word | None = None
    docker: tuple[Word, ...] = ()
    """The words of `docker run` before the launcher."""
    mpirun: tuple[Word, ...] = ()
    """The words of mpirun before the launcher."""
    is_elsewhere: bool = False
    """Whether it is run by ssh, mpirun or the like."""
    is_expanded_late: bool = False
    """Whether the shell that expands the variables runs where the launcher runs."""
    depth: int = 0

    def value(self, name: str) -> str | None:
        """The constant that a flag is given."""
        flag = self.flags.get(name)
        return self.script.constant(flag.value) if flag and flag.value else None

    @cached_property
    def config(self) -> Script | None:
        """The file of accelerate's --config_file, in the folder of the script or one above."""
        return self._document(self.value("config-file") or "")

    @property
    def deepspeed_config(self) -> Script | None:
        """The JSON that the training script gets as `--deepspeed_config` or `--deepspeed`."""
        words = " ".join(word.plain or "$" for word in self.arguments)
        name = _DEEPSPEED_CONFIG.search(words)
        return self._document(name[1]) if name else None

    def _document(self, name: str) -> Script | None:
        """The text of a settings file, in the folder of the script or one above."""
        if not name:
            return None

        outermost = self.script.outermost
        for folder in outermost.path.parents:
            path = Path(os.path.normpath(folder / name))
            if path in outermost.documents:
                return Script(path, outermost.documents[path])

        return None

    def configured(self, name: str) -> Word | None:
        """What that file sets in place of a flag that is not given."""
        if self.config is None or name in self.flags or not self.is_sure:
            return None

        key = name.replace("-", "_")
        setting = re.search(rf"^{key}:[ \t]*['\"]?([\w.]+)", self.config.text, re.MULTILINE)
        return Word(*setting.span(), setting[1]) if setting else None

    @property
    def is_torchrun(self) -> bool:
        """Whether torchrun starts it, also by its old name."""
        return self.kind in {TORCHRUN, OLD_LAUNCH}

    @property
    def is_of_operator(self) -> bool:
        """Whether Kubeflow tells torchrun how many nodes there are and where they meet."""
        container = self.script.container
        return container is not None and container.sets_torchrun_flags


_IN_UNKNOWN_FOLDER = re.compile(r"\$(?:\w+|\{\w+\})/([\w./-]+\.py)")


def training_file(launch: Launch) -> str:
    """The Python file that it starts, as it is written, or below a folder that is not known; empty
    if it is not known.

    `train.py` for `torchrun train.py` and `torchrun $DIR/train.py`, `lib/train.py` for
    `python -m lib.train`.
    """
    words = [_known_part(launch.script, word) for word in launch.arguments]
    path = next((word for word in words if word and not word.startswith("-")), "")

    is_module = "module" in launch.flags or words[:1] == ["-m"]
    if is_module:
        return f"{path.replace('.', '/')}.py" if path else ""

    return path.removeprefix("./") if path.endswith(".py") else ""


def _known_part(script: Script, word: Word) -> str:
    """`train.py` of `$CODE/train.py`; empty for other words whose value is not known."""
    below = _IN_UNKNOWN_FOLDER.fullmatch(word.text)
    return below[1] if below else script.constant(word) or ""


def working_folder(launch: Launch) -> str:
    """The folder that the script enters before, from its own one: `code` after `cd code`."""
    folder = ""
    for command in launch.script.outermost.commands:
        if command.start >= launch.command.start:
            break
        if command.words[0].plain == "cd" and len(command.words) > 1:
            entered = command.words[1].plain or ""
            is_below = entered != "" and not entered.startswith(("/", "~", "-"))
            folder = os.path.normpath(f"{folder}/{entered}".lstrip("/")) if is_below else ""
    return folder


def launches(script: Script) -> list[Launch]:
    """All launches of a script, in order."""
    if script not in _LAUNCHES:
        _LAUNCHES[script] = [
            launch
            for command in script.commands
            for launch in _in_words(script, command.words, Launch(command, script))
        ]

    return _LAUNCHES[script]


def _in_words(script: Script, written: Sequence[Word], around: Launch) -> Iterator[Launch]:
    """The launches in the words of a command; `around`: what comes before the words.

    Read from the left; each program that runs another is dropped with its options:

        env A=1 srun -N 2 docker run image torchrun train.py
        srun -N 2 docker run image torchrun train.py
        docker run image torchrun train.py
        torchrun train.py
    """
    words = list(_expanded(script, written))

    while words:
        name = _base(words[0])
        if ASSIGNMENT.match(script.text, words[0].start, words[0].end):
            words = words[1:]
        elif name in _STEPPED_OVER:
            words = list(itertools.dropwhile(_is_option, words[1:]))

        elif name == "srun":
            options, num_taken, is_sure = read_options(words[1:], script.constant)
            around = replace(around, srun=Options(options, is_sure), srun_word=words[0])
            words = words[1 + num_taken :]

        elif name in _WITH_OPTIONS:
            around = replace(around, is_elsewhere=around.is_elsewhere or name in _ELSEWHERE)
            yield from _in_quoted(script, words[1:], around)

            before = tuple(itertools.takewhile(lambda word: not _is_program(word), words))
            if name in _DOCKER:
                around = replace(around, docker=before)
            elif name in _MPIRUN:
                around = replace(around, mpirun=before)

            words = words[len(before) :]

        else:
            yield from _in_program(script, words, around)
            return


def _in_program(script: Script, words: Sequence[Word], around: Launch) -> Iterator[Launch]:
    """A command that begins with a shell, a script or a launcher."""
    is_shell = _base(words[0]) in _SHELLS
    file = _file_of(script, words[1] if is_shell and words[1:] else words[0])

    if is_shell and file is None and all(word.plain in _READS_INPUT for word in words[1:]):
        file = script.input_of(around.command)

    if file is not None:
        yield from _in_file(script, file, around)
    elif is_shell:
        yield from _in_quoted(script, _code_of_shell(words), around)
    else:
        yield from _launch(script, words, around)


def _code_of_shell(words: Sequence[Word]) -> Sequence[Word]:
    """The word after `-c`, or after `-lc`; empty if there is none."""
    for number, word in enumerate(words[1:], start=2):
        if not _is_option(word):
            break
        if re.fullmatch(r"-\w*c", word.head):
            return words[number : number + 1]

    return []


def _base(word: Word) -> str:
    """`torchrun` of `/usr/bin/torchrun`."""
    return (word.plain or "").rsplit("/", 1)[-1]


def _expanded(script: Script, words: Sequence[Word]) -> Iterator[Word]:
    """The words of a command; a variable that holds a program or a Python file has its name as its
    text: `$PY $SCRIPT`."""
    for word in script.expanded(words):
        constant = script.constant(word) if word.variable else None
        value = replace(word, text=constant or "")
        is_program = _is_program(value) or value.text.endswith(".py")
        yield value if is_program else word


def _is_option(word: Word) -> bool:
    """`-n`, and its value in `-n 10`."""
    return word.head.startswith("-") or (word.plain or "").isdigit()


def _is_program(word: Word) -> bool:
    """Whether it may begin a command that is read further."""
    name = _base(word)
    is_listed = name in {"torchrun", "srun", "accelerate", "deepspeed", *_SHELLS}
    return is_listed or _PYTHON_NAME.fullmatch(name) is not None


def _in_quoted(script: Script, words: Sequence[Word], around: Launch) -> Iterator[Launch]:
    """The launches in code that another shell reads: `bash -c "..."`, `ssh host '...'`."""
    if around.depth >= _DEEPEST:
        return

    for word in words:
        inside = inside_quotes(script.text, word)
        if inside is None or not any(letter.isspace() for letter in script.text[slice(*inside)]):
            continue

        # Of code in double quotes, the outer shell expands the variables.
        is_late = script.text[word.start] != '"' or word.code is not None
        inner = script.inner(*inside) if is_late else script
        commands = inner.commands if is_late else read_commands(script.text, *inside)
        deeper = _deeper(around, inner, is_late)

        for command in commands:
            outer = command if is_late and inner.container else around.command
            is_background = around.command.is_background or command.is_background
            surroundings = replace(outer.around, is_background=is_background)
            outer = Command(outer.words, surroundings)
            yield from _in_words(inner, command.words, replace(deeper, command=outer))


def _deeper(around: Launch, inner: Script, is_late: bool) -> Launch:
    """What comes before the words of an inner script."""
    is_expanded_late = is_late or around.is_expanded_late
    return replace(around, depth=around.depth + 1, script=inner, is_expanded_late=is_expanded_late)


def _file_of(script: Script, word: Word) -> WrittenFile | None:
    """What the script has written to the file that a word names."""
    return script.written_files.get(word.text.removeprefix("./")) if "." in word.text else None


def _in_file(script: Script, file: WrittenFile, around: Launch) -> Iterator[Launch]:
    """In a here-document that the script has written to a file, and runs."""
    if around.depth >= _DEEPEST:
        return

    inner = script.inner(file.start, file.end) if file.is_quoted else script
    deeper = _deeper(around, inner, file.is_quoted)
    for command in read_commands(script.text, file.start, file.end):
        yield from _in_words(inner, command.words, deeper)


def _launch(script: Script, words: Sequence[Word], around: Launch) -> Iterator[Launch]:
    """The launch that words are, if they are one."""
    kind, length = _kind(words)
    if not kind:
        return

    table = FLAG_TABLES.get(kind)
    rest = tuple(words[length:])
    reading = read_flags(rest, table) if table else ReadFlags({}, True, rest=rest)
    yield replace(
        around,
        kind=kind,
        name=tuple(words[:length]),
        flags=reading.flags,
        # torchrun also reads each flag from a variable: PET_RDZV_ID.
        is_sure=reading.is_sure and "PET_" not in script.text,
        unknown_flag=reading.unknown,
        arguments=tuple(reading.rest),
    )


def _kind(words: Sequence[Word]) -> tuple[str, int]:
    """What is started, and how many words name it; empty if it is no launch.

    - `torchrun train.py`: torchrun, 1
    - `python -u -m torch.distributed.run train.py`: torchrun, 4
    - `python train.py`: python, 1
    """
    first = _base(words[0])
    if first in {TORCHRUN, DEEPSPEED}:
        return first, 1
    if first == "accelerate" and len(words) > 1 and words[1].plain == "launch":
        return ACCELERATE, 2
    if not _PYTHON_NAME.fullmatch(first) and not _PYTHON_VARIABLE.fullmatch(words[0].text):
        return "", 0

    for number, word in enumerate(words[1:-1], start=1):
        if word.plain == "-m":
            module = words[number + 1].plain or ""
            return (_MODULES[module], number + 2) if module in _MODULES else (PYTHON, 1)
        if not word.head.startswith("-"):
            break

    return PYTHON, 1

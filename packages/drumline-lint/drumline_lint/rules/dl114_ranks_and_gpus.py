"""DL114: a node starts more ranks than it has GPUs, or leaves some of them idle."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.program.program import Program
from drumline_lint.reading.allocation import (
    accelerate_machines,
    allocated_gpus,
    gpus_per_node,
    processes_per_node,
    visible_devices,
)
from drumline_lint.reading.launchers import ACCELERATE, DEEPSPEED, PYTHON, Launch, launches
from drumline_lint.reading.rendezvous import most_nodes, nodes_flag, variable
from drumline_lint.reading.shell import Script
from drumline_lint.reading.shell_parser import Word
from drumline_lint.reading.source import Source

RULE = rule("DL114")

# The script may write other numbers into its settings, or share a batch among several ranks.
_OTHER_BATCH = re.compile("batch|accum|parallel")
_BATCH_SIZE = re.compile(
    r'"(train_batch_size|train_micro_batch_size_per_gpu|gradient_accumulation_steps)"\s*:\s*(\d+)'
)
_GPUS_IN_COMMENT = re.compile(
    r"^[ \t]*#(?!SBATCH)[^\n]*?\b(\d{1,2})[ -](?:\w+ )?GPUs?"
    r" (?:each|(?:per|(?:on|in) (?:each|every|a)) (?:node|machine|host|instance|server))\b[^\n]*",
    re.MULTILINE | re.IGNORECASE,
)
# `# tested on 8 GPUs per node` says nothing of the machines of this launch.
_OF_ANOTHER_RUN = re.compile(
    r"\b(?:tested|original(?:ly)?|paper|authors?|reported|was|were)\b", re.IGNORECASE
)
_COUNTS = ("nproc-per-node", "num-processes", "num-gpus")
_MULTIPLY = "multiply it by the number of machines"


def check(program: Program, source: Source) -> Iterator[Finding]:
    """What a README starts, with a settings file whose numbers do not fit.

    For example:

        deepspeed --num_gpus 8 train.py --deepspeed_config ds_config.json
    """
    for launch in program.starts_of(source):
        if launch.script.outermost.is_readme:
            yield from _batch_sizes(launch)


def check_shell(script: Script) -> Iterator[Finding]:
    """More ranks on a node than it has GPUs, and other numbers of ranks and GPUs that do not fit.

    For example:

        #SBATCH --gres=gpu:2
        torchrun --nproc-per-node=4 train.py
    """
    for launch in launches(script):
        yield from _other_gpus(script, launch)
        yield from _batch_sizes(launch)
        if finding := _total_of_one_machine(script, launch):
            yield finding
            continue

        processes = processes_per_node(launch) or 0
        gpus = gpus_per_node(launch)
        # Tasks of Python may be something else than ranks.
        is_training = launch.kind != PYTHON or "MASTER_ADDR" in script.text
        if gpus and is_training and processes > gpus:
            by = "srun" if launch.kind == PYTHON else launch.kind
            has = f"{gpus} GPU" if gpus == 1 else f"{gpus} GPUs"
            message = f"{by} starts {processes} ranks on a node that has {has}"
            yield RULE.at(script, _place(launch), message)


def _place(launch: Launch) -> Word:
    """Where the number of ranks is written: `--nproc-per-node=4`."""
    for name in _COUNTS:
        if name in launch.flags:
            return launch.flags[name].word

    container = launch.script.container
    return container.processes if container and container.processes else launch.name[-1]


def _total_of_one_machine(script: Script, launch: Launch) -> Finding | None:
    """--num_processes of accelerate: fewer than the machines, or the name of a number of one.

    For example:

        accelerate launch --num_machines 2 --num_processes $GPUS_PER_NODE train.py
    """
    machines = accelerate_machines(launch) if launch.kind == ACCELERATE else None
    if machines is None or machines < 2:
        return None

    total = launch.flags.get("num-processes")
    if total is None:
        return _configured_total(launch, machines)
    if total.value is None:
        return None

    value = launch.value("num-processes") or ""
    is_less = value.isdigit() and int(value) < machines
    is_certain = is_less or "PER_" in total.value.variable
    if not is_certain and value != str(_gpus_of_machine(launch)):
        return None

    message = (
        f"--num_processes is the total of {machines} machines, and {total.value.text} that of one"
    )
    severity = Severity.WARNING if is_certain else _severity_by_comment(launch)
    return RULE.at(script, total.word, message, fix=_MULTIPLY, severity=severity)


def _configured_total(launch: Launch, machines: int) -> Finding | None:
    """num_processes in the file of --config_file: the number of GPUs of one of its machines.

    For example:

        num_machines: 2
        num_processes: 4
    """
    total = launch.configured("num-processes")
    if total is None or launch.config is None or total.text != str(_gpus_of_machine(launch)):
        return None

    message = f"num_processes is the total of {machines} machines, and each has {total.text} GPUs"
    severity = _severity_by_comment(launch)
    return RULE.at(launch.config, total, message, fix=_MULTIPLY, severity=severity)


def _gpus_of_machine(launch: Launch) -> int | None:
    """How many GPUs a machine has: by the launch, or by what a comment of the script says.

    For example:

        # two machines with 8 GPUs each
    """
    counts = {comment[1] for comment in _comments_on_gpus(launch)}
    count_in_comment = int(counts.pop()) if len(counts) == 1 else None
    return gpus_per_node(launch) or count_in_comment


def _severity_by_comment(launch: Launch) -> Severity:
    """A note where only a comment says how many GPUs a machine has, and that of another run.

    For example:

        # the original used 8 GPUs per node
    """
    comments = [comment[0] for comment in _comments_on_gpus(launch)]
    is_of_other = all(map(_OF_ANOTHER_RUN.search, comments))
    return Severity.NOTE if is_of_other and not gpus_per_node(launch) else Severity.WARNING


def _comments_on_gpus(launch: Launch) -> Iterator[re.Match[str]]:
    return _GPUS_IN_COMMENT.finditer(launch.script.outermost.text)


def _batch_sizes(launch: Launch) -> Iterator[Finding]:
    """What DeepSpeed checks first: the batch of all ranks is the product of the other numbers.

    On 4 ranks:

        {
          "train_batch_size": 32,
          "train_micro_batch_size_per_gpu": 4,
          "gradient_accumulation_steps": 1
        }
    """
    config = launch.deepspeed_config
    if config is None or launch.kind == PYTHON or "parallel" in config.text:
        return
    if any(_OTHER_BATCH.search(word.text) for word in launch.arguments):
        return

    is_of_nodes = nodes_flag(launch) in launch.flags or "hostfile" in launch.flags
    nodes = most_nodes(launch) if is_of_nodes else 1
    ranks = (processes_per_node(launch) or 0) * (nodes or 0)
    sizes = {size[1]: size for size in _BATCH_SIZE.finditer(config.text)}
    if len(sizes) < 3 or not ranks:
        return

    total = sizes.pop("train_batch_size")
    counts = [size[2] for size in sizes.values()]
    product = ranks * math.prod(map(int, counts))
    if int(total[2]) != product:
        message = (
            f"train_batch_size is {total[2]}, and {' x '.join(counts)} on {ranks} ranks are {product}: "
            "deepspeed.initialize fails"
        )
        fix = f"write {product}, or leave train_batch_size out"
        yield RULE.at(config, Word(*total.span()), message, fix=fix)


def _other_gpus(script: Script, launch: Launch) -> Iterator[Finding]:
    """CUDA_VISIBLE_DEVICES that names GPUs outside of the allocation, which count from 0, or that
    deepspeed ignores.

    For example:

        #SBATCH --gres=gpu:2
        CUDA_VISIBLE_DEVICES=4,5 torchrun --nproc-per-node=2 train.py
    """
    devices = variable(launch, "CUDA_VISIBLE_DEVICES")
    numbers = visible_devices(launch)
    if devices is None or not numbers:
        return

    gpus = allocated_gpus(launch)
    if gpus and max(numbers) >= gpus >= len(numbers):
        message = f"the job has {gpus} GPUs, and GPU {max(numbers)} is none of them"
        fix = "leave CUDA_VISIBLE_DEVICES as the scheduler sets it"
        yield RULE.at(script, devices, message, fix=fix)

    first_gpus = list(range(processes_per_node(launch) or 0))
    if launch.kind == DEEPSPEED and "num-gpus" in launch.flags and numbers != first_gpus:
        listed = ",".join(map(str, numbers))
        message = f"beside --num_gpus deepspeed ignores CUDA_VISIBLE_DEVICES={listed}, and takes the first GPUs"
        fix = f"replace both by --include localhost:{listed}"
        flag = launch.flags["num-gpus"].word
        yield RULE.at(script, flag, message, fix=fix, severity=Severity.WARNING)

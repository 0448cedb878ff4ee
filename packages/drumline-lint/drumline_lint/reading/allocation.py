"""Where a launch runs: how many nodes and tasks start the same command, and how many GPUs each
node has."""

from __future__ import annotations

import itertools
import math
import re

from drumline_lint.reading.launchers import ACCELERATE, DEEPSPEED, PYTHON, Launch
from drumline_lint.reading.rendezvous import least_nodes, variable
from drumline_lint.reading.slurm import Options, whole_number

TASK_VARIABLES = {"SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"}
"""Slurm gives each task its own value; in a batch script they are 0."""
_TASK_VARIABLE = re.compile(r"SLURM_(?:PROCID|LOCALID|NODEID)|JOB_COMPLETION_INDEX")
# Options that say on which hosts mpirun starts processes.
_HOSTS_OF_MPIRUN = re.compile(
    r"--?(?:hostfile|machinefile|hosts?|npernode|per-?host|ppn)\b|-H|-N|ppr:"
)
# With one of these an srun runs on some of the job's nodes, and others may run beside it.
_PART_OF_NODES = {"nodelist", "relative", "exclude", "multi-prog"}


def started_on_nodes(launch: Launch) -> int | None:
    """On how many nodes this very command is started; None if it is not known.

    - the replicas of a container
    - the nodes of `srun --nodes=2`, or of the job
    - 1 for the body of a batch script, and for `srun --ntasks=1`
    """
    container = launch.script.container
    if container is not None:
        return container.replicas
    if launch.is_elsewhere:
        return None

    batch = launch.script.sbatch
    srun = launch.srun
    if srun is None:
        return 1 if batch.by_name else None
    if not srun.is_sure or _PART_OF_NODES & srun.by_name.keys():
        return None

    says_more = {"ntasks", "nodes", "ntasks-per-node"} & srun.by_name.keys()
    is_one_task = batch.number("ntasks") == 1 and "ntasks-per-node" not in batch.by_name
    if srun.number("ntasks") == 1 or (is_one_task and not says_more):
        return 1

    return srun.number("nodes") if "nodes" in srun.by_name else batch.number("nodes")


def tasks_per_node(launch: Launch) -> int | None:
    """How often the command is started on each node; None for mpirun, and if it is not known."""
    if launch.srun is None:
        return None if launch.mpirun else 1
    return _srun_tasks(launch.srun, launch.script.sbatch) if launch.srun.is_sure else None


def mpirun_processes(launch: Launch) -> int | None:
    """How many processes mpirun starts, if all of them are on this host."""
    has_hosts = any(_HOSTS_OF_MPIRUN.match(word.plain or "") for word in launch.mpirun)
    if has_hosts or launch.script.sbatch.by_name or least_nodes(launch) != 1:
        return None

    for word, following in itertools.pairwise(launch.mpirun):
        if word.plain in ("-np", "-n", "--np"):
            return whole_number(launch.script.constant(following))

    return None


def _srun_tasks(srun: Options, batch: Options) -> int | None:
    """The tasks on a node, by srun's own options and those of the header.

    Beside a number of tasks in the header, some versions of srun ignore their own
    --ntasks-per-node; what is meant by it counts.
    """
    nodes = srun.number("nodes") or batch.number("nodes")

    for options in (srun, batch):
        if "ntasks" in options.by_name:
            total = options.number("ntasks")
            if total == 1:
                return 1
            return math.ceil(total / nodes) if total and nodes else None

        if "ntasks-per-node" in options.by_name:
            return options.number("ntasks-per-node")

    return 1


def sees_one_gpu(launch: Launch) -> bool:
    """`srun --gpus-per-task=1`: each task sees one GPU, which is cuda:0 there."""
    if launch.srun is None:
        return False

    options = {**launch.script.sbatch.by_name, **launch.srun.by_name}
    is_one = (options.get("gpus-per-task") or "").rpartition(":")[2] == "1"

    return is_one and "gpu-bind" not in options


def processes_per_node(launch: Launch) -> int | None:
    """How many ranks are started on a node; None for `gpu`, `auto` and unknown values.

    - 8 for `torchrun --nproc-per-node 8`, and 1 without this flag
    - 8 for `accelerate launch --num_processes 16 --num_machines 2`
    - the tasks on a node, for `srun python train.py`
    """
    if launch.kind == ACCELERATE:
        total = whole_number(launch.value("num-processes"))
        return _divided(total, accelerate_machines(launch))

    if launch.kind == DEEPSPEED:
        return whole_number(launch.value("num-gpus"))

    if launch.kind == PYTHON:
        # One task may start further ranks itself.
        tasks = tasks_per_node(launch) or 1
        return tasks if launch.srun is not None and tasks > 1 else None

    if "nproc-per-node" in launch.flags:
        return whole_number(launch.value("nproc-per-node"))

    container = launch.script.container
    if container is not None and launch.is_of_operator:
        return whole_number(container.processes.plain) if container.processes else None

    return 1 if launch.is_sure else None


def _divided(total: int | None, parts: int | None) -> int | None:
    """The size of equal parts; None if there are none."""
    return total // parts if total and parts and total % parts == 0 else None


def accelerate_machines(launch: Launch) -> int | None:
    """Of how many machines --num_processes is the total; None if it is not known."""
    if "num-machines" in launch.flags:
        return least_nodes(launch)
    if setting := launch.configured("num-machines"):
        return whole_number(setting.text)

    is_unknown = "config-file" in launch.flags and launch.config is None
    return None if is_unknown else 1


def gpus_per_node(launch: Launch) -> int | None:
    """How many GPUs the processes of one node can see."""
    visible = len(visible_devices(launch)) or None
    counts = [count for count in (visible, allocated_gpus(launch)) if count is not None]
    return min(counts, default=None)


def allocated_gpus(launch: Launch) -> int | None:
    """How many GPUs of a node a container, `docker run` or Slurm gives it."""
    if launch.script.container is not None:
        return launch.script.container.gpus
    if launch.docker:
        return whole_number(docker_option(launch, "--gpus"))
    if launch.is_elsewhere:
        return None

    for options in (launch.srun, launch.script.sbatch):
        count = None if options is None else _gpus_of(options)
        if count is not None:
            return count

    return None


def _gpus_of(options: Options) -> int | None:
    """By a number for each node, or the total of all nodes: `--gpus=4`, `--gpus=a100:4`."""
    if options.gpus_per_node is not None:
        return options.gpus_per_node

    total = whole_number((options.by_name.get("gpus") or "").rpartition(":")[2])
    nodes = options.number("nodes") or (1 if options.number("ntasks") == 1 else None)
    return _divided(total, nodes)


def docker_option(launch: Launch, name: str) -> str | None:
    """The value of an option of `docker run`; empty if it is not known."""
    for word, following in itertools.pairwise((*launch.docker, launch.name[0])):
        if word.head == name:
            return launch.script.constant(following) or ""
        if word.head.startswith(f"{name}="):
            written = launch.script.constant(word) or ""
            return written.partition("=")[2]

    return None


def visible_devices(launch: Launch) -> list[int]:
    """The numbers in CUDA_VISIBLE_DEVICES; empty if they are not known."""
    devices = variable(launch, "CUDA_VISIBLE_DEVICES")
    text = launch.value("gpu-ids") or (devices.constant if devices else None) or ""

    is_list = re.fullmatch(r"\d{1,4}(,\d{1,4})*", text)
    return [int(device) for device in text.split(",")] if is_list else []


def uses_task_variable(launch: Launch) -> bool:
    """Whether each task gets arguments of its own, as independent runs do."""
    if not launch.is_expanded_late:
        return False

    return any(_TASK_VARIABLE.search(word.text) for word in launch.arguments)

"""Where a launch runs: how many nodes and tasks start the same command, and how many GPUs each
node has."""

from __future__ import annotations

import itertools
import re

from drumline_lint.reading.environment import variable
from drumline_lint.reading.launchers import ACCELERATE, DEEPSPEED, PYTHON, Launch, launches
from drumline_lint.reading.rendezvous import least_nodes
from drumline_lint.reading.shell import Script
from drumline_lint.reading.slurm import Options

TASK_VARIABLES = {"SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"}
"""Slurm gives each task its own value; in a batch script they are 0."""
_TASK_VARIABLE = re.compile(r"SLURM_(?:PROCID|LOCALID|NODEID)|JOB_COMPLETION_INDEX")
# With one of these an srun runs on some of the job's nodes, and others may run beside it.
_PART_OF_NODES = {"nodelist", "relative", "exclude", "multi-prog"}
_MPIRUN_PER_NODE = {"-npernode", "--npernode", "-N", "-ppn", "--ppn", "-perhost"}
_MPIRUN_MAPPING = {"-map-by", "--map-by"}
_MPIRUN_HOSTS = set(
    "-H -host --host -hosts -hostfile --hostfile -f -machinefile --machinefile".split()
)
_MPIRUN_TOTAL = {"-n", "-np", "--np"}


def header(launch: Launch) -> Options:
    return _outermost(launch.script).sbatch


def _outermost(script: Script) -> Script:
    return script if script.outer is None else _outermost(script.outer)


def started_on_nodes(launch: Launch) -> int | None:
    """On how many nodes this very command is started; None if it is not known."""
    container = launch.script.container
    if container is not None:
        return container.replicas
    if launch.is_elsewhere:
        return None
    if launch.srun is None:
        return 1 if header(launch).by_name else None
    if not launch.srun.is_sure or _PART_OF_NODES & launch.srun.by_name.keys():
        return None
    return _srun_nodes(launch.srun, header(launch))


def _srun_nodes(srun: Options, batch: Options) -> int | None:
    if srun.number("ntasks") == 1:
        return 1
    says_more = {"ntasks", "nodes", "ntasks-per-node"} & srun.by_name.keys()
    if batch.number("ntasks") == 1 and not says_more and "ntasks-per-node" not in batch.by_name:
        return 1
    if "nodes" in srun.by_name:
        return srun.number("nodes")
    return batch.number("nodes") if "nodes" in batch.by_name else None


def tasks_per_node(launch: Launch) -> int | None:
    """How often the command is started on each node."""
    if launch.mpirun:
        return _mpirun_tasks(launch)
    if launch.srun is None:
        return 1
    if not launch.srun.is_sure:
        return None
    return _srun_tasks(launch.srun, header(launch))


def sees_one_gpu(launch: Launch) -> bool:
    """`srun --gpus-per-task=1`: each task sees one GPU, which is cuda:0 there."""
    srun = launch.srun.by_name if launch.srun else {}
    options = {**header(launch).by_name, **srun}
    is_bound = (options.get("gpus-per-task") or "").rpartition(":")[2] == "1"
    return launch.srun is not None and is_bound and "gpu-bind" not in options


def _srun_tasks(srun: Options, batch: Options) -> int | None:
    """Beside a number of tasks in the header, some versions of srun ignore their own
    --ntasks-per-node; what is meant by it counts."""
    nodes = srun.number("nodes") or batch.number("nodes")
    if "ntasks" in srun.by_name:
        return _divided(srun.number("ntasks"), nodes)
    if "ntasks-per-node" in srun.by_name:
        return srun.number("ntasks-per-node")
    if "ntasks-per-node" in batch.by_name and "ntasks" not in batch.by_name:
        return batch.number("ntasks-per-node")
    return _divided(batch.number("ntasks"), nodes) if "ntasks" in batch.by_name else 1


def _divided(total: int | None, nodes: int | None) -> int | None:
    if total is None or nodes is None:
        return 1 if total == 1 else None
    return -(-total // max(nodes, 1))


def _mpirun_tasks(launch: Launch) -> int | None:
    texts = [launch.script.constant(word) or "" for word in launch.mpirun]
    options = dict(itertools.pairwise(texts))
    for name in _MPIRUN_PER_NODE & options.keys():
        return _whole(options[name])
    for name in _MPIRUN_MAPPING & options.keys():
        per_node = re.match(r"ppr:(\d+):node", options[name])
        return int(per_node[1]) if per_node else None
    if _MPIRUN_HOSTS & options.keys():
        return None
    # Without hosts, all of them are on this machine.
    return next((_whole(options[name]) for name in _MPIRUN_TOTAL & options.keys()), None)


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 7 else None


def processes_per_node(launch: Launch) -> int | None:
    """How many ranks are started on a node; None for `gpu`, `auto` and unknown values."""
    if launch.kind == ACCELERATE:
        total = _whole(launch.value("num-processes"))
        machines = least_nodes(launch) if "num-machines" in launch.flags else 1
        return None if total is None or not machines or total % machines else total // machines
    if launch.kind == DEEPSPEED:
        return _whole(launch.value("num-gpus"))
    if launch.kind == PYTHON:
        # One task may start further ranks itself.
        tasks = tasks_per_node(launch) if launch.srun is not None else 1
        return tasks if tasks and tasks > 1 else None
    if "nproc-per-node" in launch.flags:
        return _whole(launch.value("nproc-per-node"))
    container = launch.script.container
    if container is not None and container.sets_torchrun_flags:
        return _whole(container.processes.plain) if container.processes else None
    return 1 if launch.is_sure else None


def gpus_per_node(launch: Launch) -> int | None:
    """How many GPUs the processes of one node can see."""
    visible = _visible_gpus(launch)
    counts = [count for count in (visible, allocated_gpus(launch)) if count is not None]
    return min(counts, default=None)


def allocated_gpus(launch: Launch) -> int | None:
    container = launch.script.container
    if container is not None:
        return container.gpus
    if launch.docker:
        return docker_gpus(launch)
    if launch.is_elsewhere:
        return None
    options = [options for options in (launch.srun, header(launch)) if options is not None]
    return next((count for count in map(_gpus_of, options) if count is not None), None)


def _gpus_of(options: Options) -> int | None:
    if options.gpus_per_node is not None:
        return options.gpus_per_node
    per_task = _count_in(options.by_name.get("gpus-per-task"))
    if per_task and "ntasks" not in options.by_name:
        return per_task * (options.number("ntasks-per-node") or 1)
    total = _count_in(options.by_name.get("gpus"))
    nodes = options.number("nodes") or (1 if options.number("ntasks") == 1 else None)
    return total // nodes if total and nodes and total % nodes == 0 else None


def _count_in(text: str | None) -> int | None:
    """Of `4`, or `a100:4`."""
    return _whole((text or "").rpartition(":")[2])


def docker_gpus(launch: Launch) -> int | None:
    value = docker_option(launch, "--gpus") or ""
    if devices := re.fullmatch(r"\"?device=([0-9]+(?:,[0-9]+)*)\"?", value):
        return len(devices[1].split(","))
    return _whole(value)


def docker_option(launch: Launch, name: str) -> str | None:
    """The value of an option of `docker run`; empty if it is not known."""
    for word, following in zip(launch.docker, (*launch.docker[1:], None), strict=True):
        if word.head == name:
            return (launch.script.constant(following) or "") if following else ""
        if word.head.startswith(f"{name}="):
            return (launch.script.constant(word) or "=").partition("=")[2]
    return None


def _visible_gpus(launch: Launch) -> int | None:
    if launch.kind == DEEPSPEED and "num-gpus" in launch.flags:
        return None  # It ignores CUDA_VISIBLE_DEVICES then: DL130.
    return len(visible_devices(launch)) or None


def visible_devices(launch: Launch) -> list[int]:
    """The numbers in CUDA_VISIBLE_DEVICES; empty if they are not known."""
    devices = variable(launch, "CUDA_VISIBLE_DEVICES")
    text = devices.script.constant(devices.assignment.value) if devices else None
    text = launch.value("gpu-ids") or text
    is_list = text is not None and re.fullmatch(r"\d{1,4}(,\d{1,4})*", text)
    return [int(device) for device in text.split(",")] if text and is_list else []


def uses_task_variable(launch: Launch) -> bool:
    """Whether each task gets arguments of its own, as independent runs do."""
    if not launch.is_expanded_late:
        return False
    end = max((word.end for word in launch.arguments), default=0)
    start = launch.arguments[0].start if launch.arguments else 0
    return _TASK_VARIABLE.search(launch.script.text[start:end]) is not None


def has_several_nodes(script: Script) -> bool:
    """Whether a script shows that its launches work on several nodes."""
    if (script.sbatch.number("nodes") or 1) > 1:
        return True
    return any(
        max(started_on_nodes(launch) or 1, least_nodes(launch) or 1) > 1
        or "hostfile" in launch.flags
        for launch in launches(script)
    )

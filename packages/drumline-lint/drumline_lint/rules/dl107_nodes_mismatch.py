"""DL107: a launcher waits for other nodes than those that it is started on."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.reading.allocation import gpus_per_node, started_on_nodes, tasks_per_node
from drumline_lint.reading.job_settings import RANK, SIZE, job_name, job_setting
from drumline_lint.reading.launchers import DEEPSPEED, PYTHON, Launch, launches
from drumline_lint.reading.rendezvous import least_nodes, most_nodes, nodes_flag
from drumline_lint.reading.shell import Script

RULE = rule("DL107")
# What starts the script, or a part of it, on the other nodes.
_DISTRIBUTES = re.compile(
    r"\b(?:srun|ssh|mpirun|mpiexec|pdsh|clush|parallel|ray|deepspeed|dask|horovodrun|ibrun|jsrun|flux)\b"
)
_OTHER_SCRIPT = re.compile(r"^(?![ \t]*(?:source|\.)[ \t])[^#\n]*\S\.(?:sh|bash)\b", re.MULTILINE)
_WITHOUT_OPERATOR = {"StatefulSet", "Job", "Deployment"}


def check_shell(script: Script) -> Iterator[Finding]:
    yield from _only_first_node(script)
    yield from _only_first_task(script)
    yield from _in_loop(script)
    yield from _members(script)
    yield from _without_hostfile(script)
    for launch in launches(script):
        expected = least_nodes(launch) or 0
        started = started_on_nodes(launch)
        is_counted = launch.srun is not None or _is_counted_pod(launch)
        if started is None or expected < 2 or not is_counted:
            continue
        if (tasks_per_node(launch) or 1) > 1:  # DL103 reports that.
            continue
        if started < expected or started > (most_nodes(launch) or started):
            flag = launch.flags[nodes_flag(launch)]
            by = "srun" if launch.srun is not None else "the manifest"
            message = f"{launch.kind} waits for {expected} nodes, but {by} starts it on {started}"
            yield RULE.at(script, flag.word, message)


def _members(script: Script) -> Iterator[Finding]:
    """Members of a job that a script starts by name."""
    started = [launch for launch in launches(script) if launch.is_elsewhere and job_name(launch)]
    jobs = {(job_name(launch), job_setting(launch, SIZE).number) for launch in started}
    ranks = {job_setting(launch, RANK).number for launch in launches(script)}
    if len(jobs) != 1 or None in ranks or len(ranks) < 2 or len(ranks) != len(launches(script)):
        return
    size = job_setting(started[0], SIZE)
    if size.number is not None and size.number > len(ranks) and size.place is not None:
        message = (
            f"{started[0].kind} waits for {size.number} nodes, but the script starts {len(ranks)}"
        )
        yield RULE.at(script, size.place, message)


def _without_hostfile(script: Script) -> Iterator[Finding]:
    """deepspeed starts the ranks of the other nodes, which it knows from a file."""
    if script.container is not None or script.sbatch.by_name or "hostfile" in script.text:
        return
    for launch in launches(script):
        nodes = least_nodes(launch) or 1
        is_by_others = {"no-ssh", "launcher"} & launch.flags.keys() or launch.srun is not None
        if launch.kind == DEEPSPEED and nodes > 1 and launch.is_sure and not is_by_others:
            message = f"without a hostfile, deepspeed knows 1 of {nodes} nodes and refuses to start"
            place = launch.flags[nodes_flag(launch)].word
            fix = "add --hostfile"
            yield RULE.at(script, place, message, fix=fix, severity=Severity.WARNING)


def _in_loop(script: Script) -> Iterator[Finding]:
    """A loop over hosts."""
    for launch in launches(script):
        loop = launch.command.loop
        hosts = script.loop_values(loop) if loop and launch.is_elsewhere else None
        expected = least_nodes(launch) or 0
        if hosts and expected > 1 and len(hosts) != expected and "node-rank" in launch.flags:
            message = f"{launch.kind} waits for {expected} nodes, but the loop has {len(hosts)}"
            yield RULE.at(script, launch.flags[nodes_flag(launch)].word, message)


def _is_counted_pod(launch: Launch) -> bool:
    container = launch.script.container
    return container is not None and container.kind in {*_WITHOUT_OPERATOR, "PyTorchJob"}


def _only_first_node(script: Script) -> Iterator[Finding]:
    """Slurm runs a batch script on the first of its nodes."""
    nodes = script.sbatch.number("nodes") or 1
    text = _without_comments(script.text)
    if "hostfile" not in text:
        text = text.replace("deepspeed", "")  # It knows no other hosts.
    if nodes < 2 or _DISTRIBUTES.search(text):
        return
    started = [launch for launch in launches(script) if not launch.command.is_conditional]
    training = [launch for launch in started if launch.kind != PYTHON]
    if not training and _trains_in_python(script):
        training = started[-1:]
    for launch in training:
        message = (
            f"Slurm runs a batch script on its first node only: {launch.kind} is not started on the other "
            f"{'node' if nodes == 2 else f'{nodes - 1} nodes'}"
        )
        yield RULE.at(
            script, launch.name[-1], message, fix=f"start it with srun: srun {launch.kind} ..."
        )


def _trains_in_python(script: Script) -> bool:
    """Whether Python is what the job is for: it has GPUs, and no other script uses them."""
    has_gpus = any(name.startswith(("gpus", "gres")) for name in script.sbatch.by_name)
    return has_gpus and _OTHER_SCRIPT.search(script.text) is None


def _only_first_task(script: Script) -> Iterator[Finding]:
    """Slurm runs a batch script once, whatever the number of tasks."""
    header = script.sbatch
    tasks = header.number("ntasks-per-node") or header.number("ntasks") or 1
    ranks = [launch for launch in launches(script) if launch.kind == PYTHON]
    # Without a GPU for each task, the number of tasks may be meant as a number of CPUs.
    is_for_ranks = len(ranks) == 1 == len(launches(script)) and gpus_per_node(ranks[0]) == tasks
    has_several_nodes = (header.number("nodes") or 1) > 1
    if tasks < 2 or has_several_nodes or not is_for_ranks:
        return
    if not _DISTRIBUTES.search(_without_comments(script.text)):
        message = f"Slurm runs a batch script once: without srun, 1 of {tasks} tasks is started"
        yield RULE.at(script, ranks[0].name[-1], message, fix="start it with srun: srun python ...")


def _without_comments(text: str) -> str:
    return re.sub(r"^[ \t]*#.*$", "", text, flags=re.MULTILINE)

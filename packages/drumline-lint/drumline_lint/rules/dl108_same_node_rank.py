"""DL108: several nodes have the same node rank."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.allocation import started_on_nodes
from drumline_lint.reading.job_settings import (
    RANK,
    SIZE,
    JobSetting,
    job_name,
    job_setting,
    loop_ranks,
)
from drumline_lint.reading.launchers import ACCELERATE, Launch, launches
from drumline_lint.reading.rendezvous import address_flag, backend, least_nodes, nodes_flag
from drumline_lint.reading.shell import Script

RULE = rule("DL108")
_RUN_ON_ALL = {"pdsh", "clush", "pssh", "parallel-ssh"}


def check_shell(script: Script) -> Iterator[Finding]:
    yield from _of_replicas(script)
    for launch in launches(script):
        of_job = [*_of_job(script, launch)]
        yield from of_job
        if of_job or not _needs_node_rank(launch):
            continue
        name = "machine_rank" if launch.kind == ACCELERATE else "node-rank"
        flag = launch.flags.get(name.replace("_", "-"))
        if flag is None and address_flag(launch) is None:
            continue  # DL109 reports that; with an endpoint, no node rank is needed.
        if flag is None:
            message = f"{least_nodes(launch)} nodes and no --{name}: every node is node 0"
            yield RULE.at(script, launch.flags[nodes_flag(launch)].word, message)
        elif (started_on_nodes(launch) or 1) > 1 and (rank := launch.value(flag.name)) is not None:
            message = f"the same command runs on every node, so each has --{name} {rank}"
            yield RULE.at(script, flag.word, message)


def _of_job(script: Script, launch: Launch) -> Iterator[Finding]:
    """Of the members of a job that this script, or the services of this file, start together."""
    rank = job_setting(launch, RANK)
    size = job_setting(launch, SIZE)
    if rank.place is None or backend(launch) not in {"static", ""} or size.value == "1":
        return
    message = _in_loop(launch, rank) or _beyond(launch, rank, size.number or 0)
    if not message and rank.number is not None and job_name(launch) is not None:
        earlier = [*_of_siblings(script), *_in_background(script, launch)]
        if (rank.value, job_name(launch)) in earlier:
            message = f"another member of this job has {rank.name} {rank.value}, too"
    if message:
        yield RULE.at(script, rank.place, message)


def _in_loop(launch: Launch, rank: JobSetting) -> str:
    """`for host in ...; do ssh $host torchrun ... --node-rank=0; done`."""
    is_step = launch.srun is not None and "nodelist" in launch.srun.by_name
    is_concurrent = launch.is_elsewhere or is_step or launch.command.is_background
    is_repeated = launch.command.loop is not None and is_concurrent
    if rank.number is not None and launch.command.words[0].plain in _RUN_ON_ALL:
        return f"the same command runs on every host, so each has {rank.name} {rank.value}"
    if rank.number is None or not is_repeated:
        return ""
    return f"each turn of the loop starts a member with {rank.name} {rank.value}"


def _beyond(launch: Launch, rank: JobSetting, size: int) -> str:
    """Ranks begin with 0."""
    ranks = [rank.value, *loop_ranks(launch)]
    numbers = [int(number) for number in ranks if number.isascii() and number.isdigit()]
    is_beyond = size > 1 and bool(numbers) and max(numbers) >= size
    return f"the ranks of {size} are 0 to {size - 1}, not {max(numbers)}" if is_beyond else ""


Member = tuple[str, tuple[str, ...] | None]


def _in_background(script: Script, launch: Launch) -> list[Member]:
    """The members that this script has started before, and not waited for."""
    waits = [command.start for command in script.commands if command.words[0].plain == "wait"]
    return [
        _member(before)
        for before in launches(script)
        if before.command.is_background
        and before.command.start < launch.command.start
        and not any(before.command.start < wait < launch.command.start for wait in waits)
    ]


def _of_siblings(script: Script) -> list[Member]:
    return [_member(launch) for sibling in script.siblings for launch in launches(sibling)]


def _member(launch: Launch) -> Member:
    return job_setting(launch, RANK).value, job_name(launch)


def _of_replicas(script: Script) -> Iterator[Finding]:
    """All pods of a StatefulSet have the same variables."""
    container = script.container
    if container is None or container.kind != "StatefulSet" or (container.replicas or 1) < 2:
        return
    for assignment in script.environment:
        value = script.constant(assignment.value)
        if assignment.name in {"RANK", "NODE_RANK"} and value and value.isdigit():
            message = f"each of the {container.replicas} pods has {assignment.name}={value}"
            yield RULE.at(script, assignment, message)


def _needs_node_rank(launch: Launch) -> bool:
    """With c10d and etcd the rendezvous gives each node its rank."""
    if (least_nodes(launch) or 1) < 2 or not launch.is_sure or launch.command.is_conditional:
        return False
    if backend(launch) != "static":
        return False
    if launch.kind == ACCELERATE:
        # Elsewhere each machine may have its own configuration file.
        return (started_on_nodes(launch) or 1) > 1 and "config-file" not in launch.flags
    container = launch.script.container
    is_set_by_operator = container is not None and container.sets_torchrun_flags
    return launch.is_torchrun and not is_set_by_operator

"""Which rank this process is in a step of srun, from Slurm's variables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

FIRST_PORT = 20_000
NUM_PORTS = 20_000


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK and the other variables for a task of an srun step; empty elsewhere (a batch script is
    not an srun step)."""
    is_step = "SLURM_PROCID" in environment and "SLURM_STEP_NODELIST" in environment
    if not is_step or int(environment.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
        return {}
    node_list = environment["SLURM_STEP_NODELIST"]
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE", "1")
    # Hosts are in the order of their ranks only if each has the same number of ranks, in blocks.
    distribution = environment.get("SLURM_DISTRIBUTION", "block")
    in_blocks = "," not in per_node and distribution.startswith("block")
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        # `4(x2),3` means four tasks on each of two nodes and three on one more.
        "LOCAL_WORLD_SIZE": re.split(r"[(,]", per_node, maxsplit=1)[0],
        "MASTER_ADDR": first_host(node_list),
        "MASTER_PORT": str(rendezvous_port(environment)),
        "DRUMLINE_NODE_NAMES": ",".join(node_names(node_list)) if in_blocks else "",
    }


def rendezvous_port(environment: Mapping[str, str]) -> int:
    job = int(environment.get("SLURM_JOB_ID", "0"))
    step = int(environment.get("SLURM_STEP_ID", "0"))
    return FIRST_PORT + (job * 7 + step) % NUM_PORTS


def first_host(node_list: str) -> str:
    """The first name of Slurm's shorthand: `gpu[007-009,12],login` begins with `gpu007`."""
    return node_names(node_list)[0]


def node_names(node_list: str) -> list[str]:
    """`gpu[007-009,12],login` is gpu007, gpu008, gpu009, gpu12 and login."""
    names: list[str] = []
    # A comma inside brackets separates numbers, one outside names.
    for word in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", node_list):
        match = re.fullmatch(r"([^\[]*)\[([\d,-]+)\](.*)", word)
        if match is None:
            names.append(word)
            continue
        prefix, numbers, suffix = match.groups()
        suffixes = node_names(suffix) or [""]
        for number in _padded_numbers(numbers):
            names += [f"{prefix}{number}{expanded}" for expanded in suffixes]
    return names


def _padded_numbers(numbers: str) -> Iterator[str]:
    """`007-009,12` is 007, 008, 009 and 12."""
    for interval in filter(None, numbers.split(",")):
        first, _, last = interval.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield str(number).zfill(len(first))

"""Starts the collectives on this machine or on all hosts, and turns the ranks' output into findings
and numbers."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from drumline.base.text import memory_size, plural
from drumline.net.interfaces import LOOPBACK
from drumline.tools.doctor.finding import Finding
from drumline.tools.doctor.pairs.examination import ANSWER_S, Coordinator
from drumline.tools.doctor.ranks.rank_processes import HostRanks, RankProcesses

CPU_PROCS = 2
LOCAL_LIMIT_S = 120.0
# Importing torch from a cold file server takes half a minute; the collectives themselves a second.
LIMIT_S = 90.0
ANSWER_MARGIN_S = 10.0

# The result of one rank from `RankProcesses.run`, with its host.
RankOutcome = Mapping[str, Any]


def local_collectives(
    procs: int | None,
    *,
    environment: Mapping[str, str],
    num_gpus: int,
    backend: str = "auto",
    limit_s: float = LOCAL_LIMIT_S,
) -> tuple[list[Finding], Mapping[str, float]]:
    """Findings and numbers of `procs` ranks on this machine; by default one per GPU that torch
    sees, or two."""
    on_gpus = backend == "nccl" or (backend == "auto" and num_gpus > 0)
    num_ranks = procs or (max(1, num_gpus) if on_gpus else CPU_PROCS)
    host = socket.gethostname()
    if on_gpus and num_ranks > num_gpus:
        what = f"NCCL needs a GPU per rank: {plural(num_ranks, 'rank')}, and torch sees {plural(num_gpus, 'GPU')}"
        fix = f"--procs {num_gpus}, or --backend gloo" if num_gpus else "--backend gloo"
        return [Finding("problem", "collectives", host, what, fix)], {}
    with socket.create_server((LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    ranks = HostRanks(0, num_ranks, num_ranks, LOOPBACK, port, limit_s, backend)
    outcomes = [{"host": host, **outcome} for outcome in RankProcesses().run(ranks, environment)]
    return collective_findings(outcomes, {}), measured(outcomes)


async def collectives_on_hosts(
    coordinator: Coordinator, procs: Mapping[int, int], backend: str
) -> list[dict[str, Any]]:
    """The outcome of each rank, in the order of ranks; `procs`: how many ranks each host has."""
    survey = coordinator.survey
    present = survey.present()
    world_size = sum(procs[number] for number in present)
    coordinator.progress(f"a process group of {plural(world_size, 'rank')}")
    await coordinator.ask_all(
        "close", ANSWER_S, {number: {} for number in present}, lambda *_: None
    )
    first = survey.hosts[present[0]]
    address = str(first.called if survey.by_ssh else first.address)
    requests: dict[int, dict[str, Any]] = {}
    first_rank = 0
    for number in present:
        ranks = HostRanks(
            first_rank, procs[number], world_size, address, survey.rendezvous_port, LIMIT_S, backend
        )
        requests[number] = asdict(ranks)
        first_rank += procs[number]
    outcomes: dict[int, list[dict[str, Any]]] = {}

    def read(number: int, answer: Any) -> None:
        host = survey.hosts[number].name
        outcomes[number] = [{"host": host, **outcome} for outcome in answer]

    await coordinator.ask_all("collectives", LIMIT_S + ANSWER_MARGIN_S, requests, read)
    return [outcome for _, host_outcomes in sorted(outcomes.items()) for outcome in host_outcomes]


def collective_findings(outcomes: Sequence[RankOutcome], names: Mapping[str, str]) -> list[Finding]:
    """The ranks' findings, each once, and the ranks that printed nothing and have no finding.

    `names`: the user's name for each host, by its host name."""
    findings = [Finding(**entry) for result in _results(outcomes) for entry in result["findings"]]
    explained = {finding.rank for finding in findings}
    named = [
        replace(finding, where=names.get(finding.where, finding.where)) for finding in findings
    ]
    for outcome in outcomes:
        rank = outcome["rank"]
        host = outcome["host"]
        if outcome.get("result") is None and rank not in explained:
            what = f"rank {rank} gave no result: {outcome.get('error')}"
            fix = f"run python -c 'import torch.distributed' on {host}"
            named.append(Finding("problem", "collectives", host, what, fix, rank))
    return list(dict.fromkeys(named))


def measured(outcomes: Sequence[RankOutcome]) -> Mapping[str, float]:
    """The numbers of the first rank that has some; empty when none has."""
    return next((result["numbers"] for result in _results(outcomes) if result.get("numbers")), {})


def collectives_line(outcomes: Sequence[RankOutcome]) -> str:
    """`collectives: 4 ranks, all values right; all_reduce of 4 MiB at 1.2 GB/s, ...`."""
    results = _results(outcomes)
    is_right = len(results) == len(outcomes) and not any(result["findings"] for result in results)
    numbers = numbers_text(measured(outcomes))
    state = "all values right" if is_right else "some checks failed"
    return f"collectives: {plural(len(outcomes), 'rank')}, {state}" + (
        f"; {numbers}" if numbers else ""
    )


def numbers_text(numbers: Mapping[str, float]) -> str:
    """`all_reduce of 4 MiB at 1.2 GB/s, the smallest in 80 us`; empty when nothing was measured."""
    if not numbers:
        return ""
    size = memory_size(int(numbers["all_reduce_bytes"]))
    rate = numbers["all_reduce_gb_per_s"]
    smallest = f"the smallest in {numbers['all_reduce_latency_us']:.0f} us"
    # A single rank sends nothing.
    return (
        f"all_reduce of {size} at {rate:.3g} GB/s, {smallest}"
        if rate
        else f"all_reduce: {smallest}"
    )


def _results(outcomes: Sequence[RankOutcome]) -> list[dict[str, Any]]:
    return [outcome["result"] for outcome in outcomes if outcome.get("result") is not None]

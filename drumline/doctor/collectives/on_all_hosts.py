"""The last part of an examination: a real process group over all hosts, once the network between them is known to work.

The coordinator gives every node its ranks, hears what each rank found, and ends them all in every case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from drumline.doctor.finding import Finding
from drumline.doctor.pairs.coordinator import ANSWER_S, Coordinator
from drumline.doctor.pairs.speed_words import collectives_text

# Importing torch on a cold file server takes half a minute; the collectives themselves a second.
LIMIT_S = 90.0
MORE_S = 10.0


async def try_collectives(
    coordinator: Coordinator, procs: dict[int, int], backend: str
) -> list[dict[str, Any]]:
    """What each rank said, in the order of ranks; `procs` is how many each host has."""
    survey = coordinator.survey
    here = survey.here()
    coordinator.progress(f"a process group of {sum(procs[number] for number in here)} ranks")
    await coordinator.ask_all("close", ANSWER_S, {number: {} for number in here})
    first = survey.hosts[here[0]]
    requests: dict[int, dict[str, Any]] = {}
    first_rank = 0
    for number in here:
        requests[number] = {
            "first_rank": first_rank,
            "num_procs": procs[number],
            "world_size": sum(procs[one] for one in here),
            "address": first.called if survey.names_matter else first.address,
            "port": survey.meeting_port,
            "patience_s": LIMIT_S,
            "backend": backend,
        }
        first_rank += procs[number]
    answers = await coordinator.ask_all("collectives", LIMIT_S + MORE_S, requests)
    return [
        {"host": survey.hosts[number].name, **said}
        for number, answer in sorted(answers.items())
        for said in answer
    ]


def collective_findings(said: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> list[Finding]:
    """What the ranks found, each thing once; a rank that says nothing, and of which nobody speaks, is a finding too.

    `names`: what we call the hosts, by what they call themselves."""
    results = [one["result"] for one in said if one.get("result") is not None]
    told = [Finding(**found) for result in results for found in result["findings"]]
    findings = dict.fromkeys(replace(found, where=names.get(found.where, found.where)) for found in told)
    text = " ".join(found.what for found in told)
    for one in said:
        if one.get("result") is None and f"rank {one['rank']} " not in text:
            what = f"rank {one['rank']} of the doctor's own process group gave no result: {one.get('error')}"
            fix = f"on {one['host']}: python -c 'import torch.distributed', and look at what it says"
            findings[Finding(level="problem", check="collectives", where=one["host"], what=what, fix=fix)] = (
                None
            )
    return list(findings)


def collectives_line(said: Sequence[Mapping[str, Any]]) -> str:
    """`collectives: 4 ranks, all values right; all_reduce of 4 MiB at 1.2 GB/s, ...`."""
    results = [one["result"] for one in said if one.get("result") is not None]
    is_right = len(results) == len(said) and not any(result["findings"] for result in results)
    numbers: Mapping[str, float] = next(
        (result["numbers"] for result in results if result.get("numbers")), {}
    )
    measured = collectives_text(numbers)
    how = "all values right" if is_right else "not all well"
    return f"collectives: {len(said)} ranks, {how}" + (f"; {measured}" if measured else "")

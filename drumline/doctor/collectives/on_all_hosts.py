"""The last part of an examination: a real process group over all hosts, once the network between them is known to work.

The coordinator gives every node its ranks, hears what each rank found, and ends them all in every case.
"""

from __future__ import annotations

from typing import Any

from drumline.doctor.pairs.coordinator import ANSWER_S, Coordinator

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

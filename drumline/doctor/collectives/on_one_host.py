"""The collectives on this machine alone."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

from drumline.doctor.collectives.processes import Ranks, Share
from drumline.doctor.collectives.results import collective_findings, numbers_of
from drumline.doctor.finding import Finding
from drumline.net.interfaces import LOOPBACK

CPU_PROCS = 2
DEADLINE_S = 120.0
LIMIT_S = 15.0


def local_collectives(
    procs: int | None,
    *,
    environment: Mapping[str, str],
    num_gpus: int,
    backend: str = "auto",
    limit_s: float = LIMIT_S,
    deadline_s: float = DEADLINE_S,
    program: Sequence[str] = (),
) -> tuple[list[Finding], Mapping[str, float]]:
    """Run them on so many ranks (one per GPU that torch would see, or two); what they found, and measured."""
    on_gpus = backend == "nccl" or (backend == "auto" and num_gpus > 0)
    num_ranks = procs or (max(1, num_gpus) if on_gpus else CPU_PROCS)
    host = socket.gethostname()
    if on_gpus and num_ranks > num_gpus:
        return [_too_many(host, num_ranks, num_gpus)], {}
    share = Share(
        first_rank=0,
        num_procs=num_ranks,
        world_size=num_ranks,
        address=LOOPBACK,
        port=_free_port(),
        limit_s=deadline_s,
        backend=backend,
        phase_limit_s=limit_s,
        program=tuple(program),
    )
    said = [{"host": host, **one} for one in Ranks().run(share, environment)]
    return collective_findings(said, {}), numbers_of(said)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def _too_many(host: str, num_ranks: int, num_gpus: int) -> Finding:
    return Finding(
        level="problem",
        check="collectives",
        where=host,
        what=f"{num_ranks} ranks cannot talk by NCCL here: it takes one rank per GPU, and torch sees {num_gpus}",
        fix=f"--procs {num_gpus}, or --backend gloo" if num_gpus else "--backend gloo",
    )

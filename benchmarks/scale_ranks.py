"""The ranks of `benchmarks.scale_grid`, one on each host: they run `benchmarks.scale_replay`, which
does what is ordered by files. Hosts are network namespaces on this machine (root is needed).
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.multinode.hosts import Testbed

ANSWER_S = 180.0


class RanksError(Exception):
    """A rank ended, or there is no result in time; the text is the end of their logs."""


class Ranks:
    """`nice`: a wait for a CPU would count as communication, so they have priority."""

    def __init__(self, bed: Testbed, folder: Path, *, nice: int) -> None:
        self.bed = bed
        self.folder = folder
        self.number = 0
        self.jobs = [
            host.start(
                sys.executable,
                "-m",
                "benchmarks.scale_replay",
                str(folder),
                str(nice),
                env={
                    "RANK": str(rank),
                    "WORLD_SIZE": str(len(bed.hosts)),
                    "MASTER_ADDR": bed.hosts[0].address,
                    "MASTER_PORT": "29500",
                    "GLOO_SOCKET_IFNAME": "eth0",
                    "OMP_NUM_THREADS": "1",
                },
            )
            for rank, host in enumerate(bed.hosts)
        ]

    def set_bandwidth(self, mbit: float) -> None:
        for host in self.bed.hosts:
            host.set_bandwidth(mbit)

    def order(self, kind: str, hosts: int, **values: Any) -> dict[str, Any]:
        """The result of the first so many ranks; the others do nothing meanwhile."""
        name = f"{self.number:04d}"
        part = self.folder / f"{name}.write"
        part.write_text(json.dumps({"kind": kind, "hosts": hosts, "number": self.number, **values}))
        part.replace(self.folder / f"{name}.order")
        self.number += 1
        result = self.folder / f"{name}.result"
        deadline = time.monotonic() + ANSWER_S
        while not result.exists():
            if time.monotonic() > deadline or not all(job.is_running() for job in self.jobs):
                raise RanksError("\n".join(job.text()[-2000:] for job in self.jobs))
            time.sleep(0.02)
        answer: dict[str, Any] = json.loads(result.read_text())
        return answer


@contextmanager
def started_ranks(num_hosts: int, *, nice: int) -> Iterator[Ranks]:
    """A rank on each of so many new hosts; they end with the hosts."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "orders"
        folder.mkdir()
        names = [chr(97 + number) for number in range(num_hosts)]
        with Testbed(Path(name), names) as bed:
            yield Ranks(bed, folder, nice=nice)

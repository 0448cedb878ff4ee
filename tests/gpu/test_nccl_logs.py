"""Real logs of NCCL: two ranks on one GPU, each as if on a host of its own (NCCL_HOSTID).

Where OUT is set, the logs are left in `$OUT/nccl/`: copied to `tests/data/nccl/` they are what
`tests/unit/tools/tune/test_nccl_log.py` reads on machines without a GPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.ranks import free_port, rank_environment

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.nccl_ranks,
]
ROOT = Path(__file__).parents[2]
LIMIT = 120.0
# Reduces until its `stop` file exists; rank 1 kills itself if `kill` does.
SCRIPT = """
import os, signal, time
from pathlib import Path
import torch
import torch.distributed as dist
rank, folder = int(os.environ["RANK"]), Path(os.environ["FOLDER"])
torch.cuda.set_device(0)
dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
value = torch.ones(1 << 20, device="cuda")
while not (folder / "stop").exists():
    dist.all_reduce(value)
    torch.cuda.synchronize()
    (folder / f"reduced-{rank}").touch()
    if rank == 1 and (folder / "kill").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)
os._exit(0)  # ranks see the file at different steps, and would wait for each other in a teardown
"""


class LoggedRanks:
    """Two processes that log to `NAME-rank0.log` and `NAME-rank1.log`."""

    def __init__(
        self, folder: Path, name: str, *, own_hosts: bool = True, **variables: str
    ) -> None:
        (folder / "reduce.py").write_text(SCRIPT)
        self.folder = folder
        self.logs = [folder / f"{name}-rank{rank}.log" for rank in range(2)]
        port = free_port()
        self.processes = [
            subprocess.Popen(
                [sys.executable, "reduce.py"],
                cwd=folder,
                env={
                    **os.environ,
                    **rank_environment(rank, 2, port),
                    "NCCL_SOCKET_IFNAME": "lo",
                    "NCCL_DEBUG": "INFO",
                    "NCCL_DEBUG_FILE": str(self.logs[rank]),
                    "NCCL_RAS_ADDR": f"localhost:{free_port()}",
                    "FOLDER": str(folder),
                    **({"NCCL_HOSTID": f"host-{rank}"} if own_hosts else {}),
                    **variables,
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for rank in range(2)
        ]

    def wait_for(self, *names: str) -> None:
        deadline = time.monotonic() + LIMIT
        while not all((self.folder / name).exists() for name in names):
            for process in self.processes:
                assert process.poll() is None, process.communicate()[0].decode()
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def wait_for_line(self, rank: int, pattern: str) -> None:
        deadline = time.monotonic() + LIMIT
        while not (self.logs[rank].exists() and re.search(pattern, self.logs[rank].read_text())):
            assert time.monotonic() < deadline, self.logs[rank].read_text()
            time.sleep(0.1)

    def finish(self) -> None:
        (self.folder / "stop").touch()
        for process in self.processes:
            process.wait(LIMIT)


@contextmanager
def logged_ranks(
    folder: Path, name: str, *, own_hosts: bool = True, **variables: str
) -> Iterator[LoggedRanks]:
    ranks = LoggedRanks(folder, name, own_hosts=own_hosts, **variables)
    try:
        yield ranks
    finally:
        for process in ranks.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()
        for log in ranks.logs:
            if log.exists():
                keep(log.name, log.read_bytes())


def keep(name: str, content: bytes) -> None:
    if out := os.environ.get("OUT"):
        folder = Path(out, "nccl")
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def text_of(ranks: LoggedRanks) -> str:
    return "".join(log.read_text() for log in ranks.logs if log.exists())


def test_two_ranks_over_sockets(tmp_path: Path) -> None:
    with logged_ranks(tmp_path, "sockets") as ranks:
        ranks.wait_for("reduced-0", "reduced-1")
        ranks.finish()
    text = text_of(ranks)
    assert f"NCCL version {'.'.join(map(str, torch.cuda.nccl.version()))}" in text
    for source, target in ((0, 1), (1, 0)):
        assert re.search(
            rf": {source}\[\d+\] -> {target}\[\d+\] \[send\] via NET/Socket/0", text
        ), text


def test_an_interface_that_does_not_exist(tmp_path: Path) -> None:
    with logged_ranks(tmp_path, "no-interface", NCCL_SOCKET_IFNAME="nonexistent0") as ranks:
        ranks.wait_for_line(0, "NCCL WARN")
    assert "nonexistent0" in text_of(ranks)


def test_two_ranks_on_one_gpu(tmp_path: Path) -> None:
    with logged_ranks(tmp_path, "duplicate-gpu", own_hosts=False) as ranks:
        ranks.wait_for_line(0, "NCCL WARN")
    assert "Duplicate GPU detected" in text_of(ranks)


def test_a_rank_that_is_killed(tmp_path: Path) -> None:
    with logged_ranks(tmp_path, "killed") as ranks:
        ranks.wait_for("reduced-0", "reduced-1")
        (tmp_path / "kill").touch()
        ranks.wait_for_line(0, "NCCL WARN")
    assert "NCCL WARN" in ranks.logs[0].read_text()

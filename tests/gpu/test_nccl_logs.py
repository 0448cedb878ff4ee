"""Real logs of NCCL, and its RAS asked while ranks run and while one is stopped: two ranks on one
GPU, each as if on a host of its own (NCCL_HOSTID).

Where OUT is set, the logs and RAS's answers are left in `$OUT/nccl/`: copied to `tests/data/nccl/`
they are what `tests/unit/tools/tune/test_nccl_log.py` and `tests/unit/watch/sidecar/test_ras.py`
read on machines without a GPU.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from drumline.watch.cluster_state import RasRank
from drumline.watch.sidecar.system_evidence import RAS_LIMIT_S, ask_ras, request_status
from tests.gpu.test_nccl_ranks import OWN_HOSTS, TASKS
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
SLEEPS = """
import time

class Sleeps(Faulty):
    def fail(self):
        time.sleep(600)
"""


class LoggedRanks:
    """Two processes that log to `NAME-rank0.log` and `NAME-rank1.log`."""

    def __init__(
        self, folder: Path, name: str, *, own_hosts: bool = True, **variables: str
    ) -> None:
        (folder / "reduce.py").write_text(SCRIPT)
        self.folder = folder
        self.logs = [folder / f"{name}-rank{rank}.log" for rank in range(2)]
        self.ras_port = free_port()
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
                    "NCCL_RAS_ADDR": f"localhost:{self.ras_port}",
                    "FOLDER": str(folder),
                    **({"NCCL_HOSTID": f"host-{rank}"} if own_hosts else {}),
                    **variables,
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for rank in range(2)
        ]
        self.pids = {rank: process.pid for rank, process in enumerate(self.processes)}

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

    def ask_ras(self) -> tuple[RasRank, ...]:
        return asyncio.run(ask_ras(f"localhost:{self.ras_port}", self.pids, 2))

    def keep_status(self, name: str) -> None:
        """RAS's answer as it is."""

        async def request() -> bytes:
            async with asyncio.timeout(20 * RAS_LIMIT_S):
                return await request_status("127.0.0.1", self.ras_port)

        keep(name, asyncio.run(request()))


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


def test_ras_is_asked_while_ranks_run_and_while_one_is_stopped(tmp_path: Path) -> None:
    with logged_ranks(tmp_path, "ras") as ranks:
        ranks.wait_for("reduced-0", "reduced-1")
        deadline = time.monotonic() + LIMIT
        while len(answers := ranks.ask_ras()) < 2:
            assert time.monotonic() < deadline, answers
        assert all(
            answer.answers and answer.is_member and not answer.error and answer.num_collectives
            for answer in answers
        ), answers
        ranks.keep_status("ras-healthy.json")
        os.kill(ranks.pids[1], signal.SIGSTOP)
        begun = time.monotonic()
        answers = ()
        while all(answer.answers for answer in answers):
            assert time.monotonic() < deadline, answers
            time.sleep(0.2)
            answers = ranks.ask_ras()
        print(f"RAS misses a stopped rank after {time.monotonic() - begun:.1f} s: {answers}")
        assert [answer.rank for answer in answers if not answer.answers] == [1]
        ranks.keep_status("ras-stopped.json")
        os.kill(ranks.pids[1], signal.SIGCONT)
        ranks.finish()


def test_a_diagnosis_has_what_ras_reports(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(OWN_HOSTS)
    (tmp_path / "tasks.py").write_text(TASKS + SLEEPS)
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    words = ["launch", "--procs", "2", "--max-restarts", "0", "tasks.py:Sleeps", "--run", "run"]
    words += ["--train.step", "eager", "--watch.on_hang", "stop", "--watch.hang_s", "8"]
    ended = subprocess.run(
        [sys.executable, "-m", "drumline", *words],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": path,
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_RAS_ADDR": f"localhost:{free_port()}",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        },
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert ended.returncode != 0, ended.stdout + ended.stderr
    texts = [file.read_text() for file in sorted((tmp_path / "run" / "diagnoses").glob("*.txt"))]
    assert any(
        re.search(r"NCCL RAS: collectives begun: rank 1: [\d,]+; rank 0: [\d,]+", text)
        for text in texts
    ), texts
    if out := os.environ.get("OUT"):
        shutil.copytree(
            tmp_path / "run" / "diagnoses", Path(out, "nccl", "diagnoses"), dirs_exist_ok=True
        )

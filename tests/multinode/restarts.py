"""Repeated restarts: a rank exits in the middle of a job, all are restarted, and must join every
time.

Under gloo plain torchrun loses more than half of its restarts on two hosts: the store outlives an
attempt, and ranks find the addresses of the one before in it. `make soak-restarts` runs many of
them, `test_nodes_join.py` a few.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.multinode.hosts import Testbed

# Each rank notes its start; those who met add up who they are; then one of them, another each time,
# ends. Every third time all are killed at once, as sidecars do it: each agent then has a failure of
# its own, and it is one restart.
JOB = """
import os, random, sys
from datetime import timedelta
from pathlib import Path
folder, count = Path(sys.argv[1]), int(sys.argv[2])
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
with (folder / f"starts-{rank}").open("a") as starts:
    starts.write("start\\n")
import torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
total = torch.tensor([rank + 1, len((folder / "met").read_text().split()) if rank == 0 else 0])
dist.all_reduce(total)
assert total[0] == world_size * (world_size + 1) // 2, total
dist.barrier()
attempt = int(total[1])
if rank == 0:
    with (folder / "met").open("a") as met:
        met.write(f"{attempt}\\n")
if attempt < count:
    if attempt % 3 == 1:
        os.kill(os.getpid(), 9)
    if rank == random.Random(attempt).randrange(world_size):
        os._exit(9)
    dist.barrier()
dist.destroy_process_group()
"""
ENVIRONMENT = """
NUMBER_OF_NODES=2
NODE_RANK={rank}
NUMBER_OF_GPUS={procs}
MASTER_ADDR=10.77.0.1
MASTER_PORT=29500
GLOO_SOCKET_IFNAME=eth0
"""


def on_two_hosts(bed: Testbed, folder: Path, *, count: int, procs: int = 1) -> str:
    """Empty when every restart led to a meeting; else what was seen."""
    words = _prepared(folder, count, bed.hosts[0].python)
    jobs = []
    for rank, host in enumerate(bed.hosts):
        file = folder / f"{rank}.env"
        file.write_text(ENVIRONMENT.format(rank=rank, procs=procs))
        jobs.append(
            host.start(*words[:-3], "--env-file", str(file), *words[-3:], env=_environment())
        )
    codes = [job.wait(timeout_s=60 * (count + 1)) for job in jobs]
    return _outcome(folder, count, codes, "\n".join(job.text() for job in jobs))


def on_this_machine(
    folder: Path, *, count: int, procs: int = 2, python: str = sys.executable
) -> str:
    """The same with `--procs`: there the agent keeps the store."""
    words = _prepared(folder, count, python)
    done = subprocess.run(
        [*words[:-3], "--procs", str(procs), *words[-3:]],
        env={**os.environ, **_environment(), "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=60 * (count + 1),
        check=False,
    )
    return _outcome(folder, count, [done.returncode], done.stderr)


def _prepared(folder: Path, count: int, python: str = sys.executable) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "met").touch()
    (folder / "job.py").write_text(JOB)
    launch = [python, "-m", "drumline", "launch", "--max-restarts", str(count)]
    return [*launch, str(folder / "job.py"), str(folder), str(count)]


def _environment() -> dict[str, str]:
    return {"PYTHONPATH": str(Path(__file__).parents[2])}


def _outcome(folder: Path, count: int, codes: list[int], said: str) -> str:
    """All ended well, and no rank was started once more than there were meetings."""
    met = len((folder / "met").read_text().split())
    starts = {len(file.read_text().split()) for file in folder.glob("starts-*")}
    if not any(codes) and met == count + 1 and starts == {met}:
        return ""
    return f"{count} restarts: exit codes {codes}, {met} meetings, starts of ranks {starts}\n{said}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20)
    count = parser.parse_args().count
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with Testbed(folder / "bed", ["a", "b"]) as bed:
            wrong = [on_two_hosts(bed, folder / "hosts", count=count)]
        wrong.append(on_this_machine(folder / "here", count=count))
    for where, text in zip(("two hosts", "this machine"), wrong, strict=True):
        print(f"{where}: {text or f'{count} of {count} restarts met'}", flush=True)
    return 1 if any(wrong) else 0


if __name__ == "__main__":
    sys.exit(main())

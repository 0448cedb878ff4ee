"""A job of `drumline launch --hosts` on hosts of its own, and what can happen to it."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
from pathlib import Path

from tests.multinode import processes
from tests.multinode.faults.reading import Done, steps_of
from tests.multinode.hosts import Host, Testbed
from tests.multinode.job import Job
from tests.multinode.sshd import SshDaemons
from tests.multinode.storm.task import LEAVE_VARIABLE, STEP_VARIABLE

ROOT = Path(__file__).parents[3]
DESK = "desk"
HOSTS = ("a", "b")
SPARE = "c"
TAIL_BYTES = 1 << 14
RANK_FILE = re.compile(r"/rank-(\d+)\b")
RUN = (
    *("--train.batch_size", "16", "--optim.schedule", "constant", "--checkpoint.keep_last", "2"),
    *(
        "--dist.device",
        "cpu",
        "--dist.threads",
        "1",
        "--log.every_steps",
        "1",
        "--data.workers",
        "0",
    ),
)


class StormBed:
    """The user sits at a host of its own, from which ssh leads to the others."""

    def __init__(self, folder: Path, *, procs: int = 1) -> None:
        self.folder = folder
        self.procs = procs
        self.bed = Testbed(folder / "bed", [DESK, *HOSTS, SPARE])
        self.ssh = SshDaemons(self.bed)
        self.leave = folder / "leave"

    def launch(self, run: Path, *, steps: int, every: int, step_s: float) -> Job:
        words = ("--hosts", ",".join(HOSTS), "--spare", SPARE, "--procs", str(self.procs))
        task = f"{Path(__file__).with_name('task.py')}:Steady"
        settings = ("--train.steps", str(steps), "--checkpoint.every_steps", str(every), *RUN)
        return self.bed[DESK].start(
            *(sys.executable, "-m", "drumline", "launch", *words),
            *("--env", STEP_VARIABLE, "--env", LEAVE_VARIABLE, task, "--run", str(run), *settings),
            env={
                "PYTHONPATH": str(ROOT),
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": "1",
                "DRUMLINE_SSH": f"ssh -F {self.ssh.config}",
                STEP_VARIABLE: f"{step_s:g}",
                LEAVE_VARIABLE: str(self.leave),
            },
            cwd=self.folder,
        )

    def steps(self, run: Path) -> list[Done]:
        return steps_of(self.folder / "none", run)

    def last_step(self, run: Path) -> Done | None:
        """From the end of the events alone: all of them take a second to read after half an
        hour."""
        path = run / "events" / "rank-00000.jsonl"
        with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            events = [json.loads(line) for line in file.read().splitlines()[1:]]
            steps = [
                Done(event["time"], event["step"], 0)
                for event in events
                if event["kind"] == "train"
            ]
            return steps[-1] if steps else None
        return None

    def find(self, host: Host, word: str) -> list[int]:
        """Processes of a host by a word of their command line."""
        return [pid for pid in host.space.pids() if word in processes.command(pid)]

    def kill_agent(self, host: Host) -> None:
        """The one whose ranks run; another may wait for the next attempt."""
        parents = {processes.parent(pid) for pid in self.ranks(host).values()}
        self._signal([pid for pid in parents if pid is not None], signal.SIGKILL)

    def kill_sidecar(self, host: Host) -> None:
        self._signal(self.find(host, "drumline.watch.sidecar.main"), signal.SIGKILL)

    def kill_rank(self, host: Host, number: signal.Signals = signal.SIGKILL) -> int:
        """One of a host's ranks; returns which."""
        rank, pid = min(self.ranks(host).items())
        self._signal([pid], number)
        return rank

    def ranks(self, host: Host) -> dict[int, int]:
        """The process of each rank, by the file that it writes to."""
        results = {}
        # a sidecar, which has the same file, is younger
        for pid in sorted(host.space.pids()):
            with contextlib.suppress(OSError):
                if name := RANK_FILE.search(str(Path(f"/proc/{pid}/fd/1").readlink())):
                    results.setdefault(int(name[1]), pid)
        return results

    def power_on(self, host: Host) -> None:
        host.power_on()
        self.ssh.serve(host)

    @staticmethod
    def _signal(pids: list[int], number: signal.Signals) -> None:
        assert pids, "no process to signal"
        processes.send(pids, number)

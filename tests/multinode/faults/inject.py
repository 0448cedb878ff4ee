"""Faults inside a rank: once, on one rank, in one step, as described in the file that FAULT_PLAN
names.

Just before it strikes, a fault writes down when and where it did. That file is also the sign that
it has struck: ranks that are started again go on unharmed. Nothing of Drumline is imported here, so
that a plain script can suffer the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

VARIABLE = "FAULT_PLAN"
FOR_EVER_S = 3600
CONTROL_GROUPS = Path("/sys/fs/cgroup/memory")
LIMIT_BYTES = 400 << 20
STEP_S = 0.02
"""What a step takes at least: without it a small model would be at its end before anyone could
look."""


@dataclass(frozen=True)
class Plan:
    """What happens where; in `folder` lies what is noted about it."""

    fault: str
    rank: int
    step: int
    """In this step, counted from 1."""
    folder: str
    disk: str = ""
    """Of `full_disk`: the small one."""


class Injection:
    """One per process. `begin_step` is called in each step; `in_dataset` for each sample, in
    workers too."""

    def __init__(self, environment: Mapping[str, str], *, rank: int) -> None:
        self.plan = read_plan(Path(environment[VARIABLE]))
        self.is_mine = rank == self.plan.rank
        self._folder = Path(self.plan.folder)
        # Of an earlier start. What strikes in this one must strike all ranks that take part in it.
        self._is_spent = fired_at(self._folder) is not None
        if self._is_spent and self.plan.disk and rank == 0:
            (Path(self.plan.disk) / "ballast").unlink(missing_ok=True)

    def begin_step(self, step: int) -> None:
        """`step`: the one that begins, counted from 1."""
        time.sleep(STEP_S)
        fault = self.plan.fault
        if self._is_spent or step < self.plan.step:
            return
        if fault == "slow" and self.is_mine:
            self._note()
            time.sleep(4 * STEP_S)
        if step > self.plan.step:
            return
        if fault == "shape":
            self._different_shapes()
        elif self.is_mine:
            self._strike(fault)

    def _strike(self, fault: str) -> None:
        # The dataset, or whoever makes faults of hosts and links, goes on from there.
        if fault in ("dataset", "worker_stopped", "worker_stuck", "cut", "one_way", "host_gone"):
            (self._folder / "due").touch()
        elif fault in _IN_A_STEP:
            self._note()
            _IN_A_STEP[fault](self.plan)

    def leaves_now(self, step: int) -> bool:
        """Whether the loop is left before this step; asked by loops of a script's own."""
        if self._is_spent or not self.is_mine or not self.plan.fault.startswith("left"):
            return False
        if step == self.plan.step:
            self._note()
        return step >= self.plan.step

    def in_dataset(self, *, is_worker: bool) -> None:
        if self._is_spent or not self.is_mine or not (self._folder / "due").exists():
            return
        fault = self.plan.fault
        if fault not in (("worker_stopped", "worker_stuck") if is_worker else ("dataset",)):
            return
        if not self._note():  # another worker was first
            return
        if fault == "worker_stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(FOR_EVER_S)

    def _different_shapes(self) -> None:
        if self.is_mine:
            self._note()
        dist.all_reduce(torch.ones(7 if self.is_mine else 5))

    def _note(self) -> bool:
        return note_fired(self._folder, host=socket.gethostname())


def _kill(_: Plan) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(_: Plan) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _hold_gil(_: Plan) -> None:
    ctypes.PyDLL(None).sleep(FOR_EVER_S)


def _stay_in_user_code(_: Plan) -> None:
    time.sleep(FOR_EVER_S)


def _raise(plan: Plan) -> None:
    raise ValueError(f"a fault in step {plan.step}")


def _reduce_once_more(_: Plan) -> None:
    dist.all_reduce(torch.ones(3))


def control_group(notes: Path) -> Path:
    return CONTROL_GROUPS / f"drumline-fault-{notes.parent.name}-{notes.name}"


def enter_control_group(environment: Mapping[str, str]) -> None:
    """For the rank that is to run out of memory, as it begins: who has a limit has it from the
    start."""
    plan = read_plan(Path(environment[VARIABLE]))
    if (
        plan.fault != "memory"
        or environment.get("RANK") != str(plan.rank)
        or fired_at(Path(plan.folder))
    ):
        return
    group = control_group(Path(plan.folder))
    group.mkdir(exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    (group / "cgroup.procs").write_text(str(os.getpid()))


def _eat_memory(_: Plan) -> None:
    eaten = []
    while True:
        eaten.append(bytearray(os.urandom(1 << 20)) * 16)


def _fill_disk(plan: Plan) -> None:
    with (
        contextlib.suppress(OSError),
        (Path(plan.disk) / "ballast").open("wb", buffering=0) as file,
    ):
        while file.write(b"x" * 65536):
            pass


_IN_A_STEP = {
    "killed": _kill,
    "stopped": _stop,
    "gil": _hold_gil,
    "user_code": _stay_in_user_code,
    "exception": _raise,
    "extra": _reduce_once_more,
    "memory": _eat_memory,
    "full_disk": _fill_disk,
}


def write_plan(plan: Plan, path: Path) -> None:
    path.write_text(json.dumps(asdict(plan)))


def read_plan(path: Path) -> Plan:
    return Plan(**json.loads(path.read_text()))


def note_fired(folder: Path, *, host: str) -> bool:
    """False: it was noted before."""
    try:
        with (folder / "fired").open("x") as file:
            json.dump({"time": time.time(), "host": host, "pid": os.getpid()}, file)
    except FileExistsError:
        return False
    return True


def fired_at(folder: Path) -> float | None:
    """When the fault struck; None: it has not, or it is being written down."""
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
        return float(json.loads((folder / "fired").read_text())["time"])
    return None

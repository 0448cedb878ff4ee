"""One case of the fault matrix on real hosts: what was reported, how soon, and how the run ended.

    with Matrix(folder) as matrix:
        result = matrix.run(make_case("stopped", 3))

Every case has a folder of its own below that of the matrix; the hosts serve all of them.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.multinode import processes
from tests.multinode.faults import inject, reading
from tests.multinode.faults.catalogue import EVERY, HOSTS, RANKS_PER_HOST, Case, Fault
from tests.multinode.faults.host_faults import HostFault
from tests.multinode.faults.inject import Plan, fired_at
from tests.multinode.hosts import Testbed
from tests.multinode.job import Job

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
TASK = ("--train.batch_size", "16", "--optim.schedule", "constant", "--checkpoint.keep_last", "2")
QUIET = ("--dist.device", "cpu", "--dist.threads", "1", "--log.every_steps", "1")
HANG_S = 8.0
"""What is only suspected is acted on after this; a user's default is longer."""
TOLD_S = 45.0
END_S = 150.0
"""How long a sentence is waited for, and then the end of the run."""
DISK = "faults-of-"
DISK_BYTES = 4 << 20


@dataclass
class Result:
    """What came of a case."""

    fault: str
    seed: int
    rank: int
    host: str
    step: int
    said: list[dict[str, object]] = field(default_factory=list)
    screen: list[str] = field(default_factory=list)
    is_right: bool = False
    diagnosis_s: float | None = None
    """From the fault to the first sentence."""
    new_step_s: float | None = None
    """From the fault to the first step of the restarted job."""
    steps_lost: int | None = None
    has_right_bits: bool = False
    left_behind: list[str] = field(default_factory=list)
    codes: list[int | None] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Matrix:
    """The hosts, a small disk, and the runs that nobody disturbed."""

    def __init__(self, folder: Path, *, hang_s: float = HANG_S, warm: bool = False) -> None:
        self.folder = folder
        self._hang_s = hang_s
        self._disk = folder / "run-on-a-small-disk" / "checkpoints"
        self._disk.mkdir(parents=True)
        _unmount_orphans()
        # Before the hosts are made: they see what was mounted then.
        limit = f"size={DISK_BYTES}"
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", limit, f"{DISK}{os.getpid()}", self._disk], check=True
        )
        try:
            self.bed = Testbed(folder / "bed", HOSTS, warm=warm)
        except BaseException:
            self._unmount()
            raise
        self._references: dict[tuple[bool, int], str] = {}
        self.count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.bed.close()
        self._unmount()

    def _unmount(self) -> None:
        subprocess.run(["umount", "--lazy", self._disk], check=False)

    def new_folder(self, case: Case) -> Path:
        self.count += 1
        folder = self.folder / f"{case}-{self.count}"
        folder.mkdir()
        if case.name == "full_disk":
            self._empty_small_disk()
            (folder / "run").symlink_to(self._disk.parent)
        self.plan(case, folder)
        return folder

    def _empty_small_disk(self) -> None:
        """And the run folder around it, which a case of before has left."""
        earlier = [*self._disk.iterdir(), *self._disk.parent.iterdir()]
        for path in earlier:
            if path == self._disk:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def plan(self, case: Case, folder: Path) -> None:
        """What happens next. A rank reads it once, when it starts."""
        notes = notes_of(case, folder)
        notes.mkdir()
        disk = str(self._disk) if case.name == "full_disk" else ""
        plan = Plan(case.name, case.rank, case.step, str(notes), disk)
        inject.write_plan(plan, folder / "plan.partial")
        (folder / "plan.partial").replace(folder / "plan.json")

    def start(self, case: Case, folder: Path, node: int) -> Job:
        """The launcher of a node, as a person types it there."""
        master = f"{self.bed.hosts[0].address}:{29000 + self.count}"
        launch = (
            "launch",
            "--nodes",
            str(len(HOSTS)),
            "--node-rank",
            str(node),
            "--master",
            master,
        )
        limits = ("--procs", str(RANKS_PER_HOST), "--max-restarts", "3")
        host = self.bed.hosts[node]
        return host.start(
            *(host.python, "-m", "drumline", *launch, *limits),
            *self._program(case.fault, folder),
            cwd=folder,
            env=self.environment(folder),
        )

    def environment(self, folder: Path) -> dict[str, str]:
        return {
            "PYTHONPATH": str(ROOT),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            inject.VARIABLE: str(folder / "plan.json"),
        }

    def _program(self, fault: Fault, folder: Path) -> Sequence[str]:
        if fault.is_script:
            return (
                str(HERE / "script.py"),
                str(folder),
                str(fault.steps),
                str(EVERY),
                f"{self._hang_s:g}",
            )
        settings = (
            *("--train.steps", str(fault.steps), "--checkpoint.every_steps", str(EVERY)),
            *("--data.workers", str(fault.workers), "--watch.hang_s", f"{self._hang_s:g}"),
        )
        return (
            f"{HERE / 'task.py'}:Faulty",
            "--run",
            str(folder / "run"),
            *TASK,
            *QUIET,
            *settings,
        )

    def run(self, case: Case) -> Result:
        """A case to its end; whatever goes wrong is in the result."""
        return self.run_chain([case])[0]

    def run_chain(self, cases: Sequence[Case]) -> list[Result]:
        """Several cases in one run, each on what the one before was restarted to; all of one kind
        of program. Where a step is said, it is counted from that restart."""
        started = time.monotonic()
        results = [Result(case.name, case.seed, case.rank, case.host, case.step) for case in cases]
        folder = self.new_folder(cases[0])
        trial = Trial(self, cases, folder)
        try:
            trial.go_through()
        except AssertionError as error:
            results[-1].problems.append(str(error))
        finally:
            trial.end()
        self._read(cases, folder, trial, results)
        for result in results:
            result.codes = [job.entry.poll() for job in trial.jobs]
            result.left_behind = trial.left_behind
            result.seconds = (time.monotonic() - started) / len(cases)
        return results

    def _read(
        self, cases: Sequence[Case], folder: Path, trial: Trial, results: list[Result]
    ) -> None:
        sentences = reading.said_in(folder)
        screen = reading.sentences_on(job.text() for job in trial.all_jobs)
        steps = reading.steps_of(folder, folder / "run")
        times = [fired_at(notes_of(case, folder)) or math.inf for case in cases]
        is_same = self._has_right_bits(cases[0].fault, folder, results[-1])
        if any(sentence.time < times[0] for sentence in sentences):
            results[0].problems.append("something was said before the fault")
        for case, result, fired, next_fired in zip(
            cases, results, times, [*times[1:], math.inf], strict=True
        ):
            mine = [sentence for sentence in sentences if fired <= sentence.time < next_fired]
            result.screen = screen
            result.has_right_bits = is_same
            _judge(case, mine, steps, fired, result)

    def _has_right_bits(self, fault: Fault, folder: Path, result: Result) -> bool:
        try:
            return reading.bits_of(folder, folder / "run") == self.reference(fault)
        except AssertionError as error:
            result.problems.append(f"no end to compare: {str(error).splitlines()[0]}")
            return False

    def reference(self, fault: Fault) -> str:
        """The bits of a run like it, in which nothing happens."""
        key = (fault.is_script, fault.steps)
        if key not in self._references:
            case = Case("none", 0, rank=0, step=0)
            folder = self.new_folder(case)
            calm = replace(fault, workers=0, is_outside=False)
            trial = Trial(self, [_Calm(case.name, 0, 0, 0, calm)], folder)
            try:
                trial.wait_for_the_end()
            finally:
                trial.end()
            self._references[key] = reading.bits_of(folder, folder / "run")
        return self._references[key]


@dataclass(frozen=True)
class _Calm(Case):
    like: Fault

    @property
    def fault(self) -> Fault:
        return self.like


class Trial:
    """The launchers of a run, from their start to their end."""

    def __init__(self, matrix: Matrix, cases: Sequence[Case], folder: Path) -> None:
        self._matrix = matrix
        self._cases = cases
        self._folder = folder
        self._host_fault = HostFault(matrix.bed, cases[0], notes_of(cases[0], folder))
        self.jobs = [matrix.start(cases[0], folder, node) for node in range(len(HOSTS))]
        self.all_jobs = list(self.jobs)
        self.left_behind: list[str] = []

    def go_through(self) -> None:
        """Run until each fault was reported, and then until the run has ended."""
        for case, following in itertools.zip_longest(self._cases, self._cases[1:]):
            self._suffer(case, following)
        self.wait_for_the_end()

    def _suffer(self, case: Case, following: Case | None) -> None:
        notes = notes_of(case, self._folder)
        self._host_fault = HostFault(self._matrix.bed, case, notes)
        self._wait(lambda: fired_at(notes) is not None, f"the fault of {case}", END_S)
        fired = fired_at(notes)
        assert fired is not None, f"the run ended before the fault of {case}"
        if following is not None:
            self._matrix.plan(following, self._folder)

        def is_told() -> bool:
            steps = reading.steps_of(self._folder, self._folder / "run")
            goes_on = reading.again(steps, fired).first_new_step is not None
            return goes_on or any(
                sentence.time >= fired for sentence in reading.said_in(self._folder)
            )

        if case.fault.restarts or case.fault.is_outside:
            # the rest shows what came of it without a word
            with contextlib.suppress(AssertionError):
                self._wait(is_told, "a sentence", TOLD_S)
        self._host_fault.repair()

    def wait_for_the_end(self) -> None:
        def has_ended() -> bool:
            for node, job in enumerate(self.jobs):
                # A person types the command again where the host was gone, or the first one had
                # left.
                fault = self._cases[-1].fault
                if (
                    (fault.is_outside or fault.ends_the_run)
                    and job.entry.poll() not in (None, 0)
                    and len(self.all_jobs) < 6
                ):
                    self.jobs[node] = self._matrix.start(self._cases[-1], self._folder, node)
                    self.all_jobs.append(self.jobs[node])
            return not any(job.is_running() for job in self.jobs)

        self._wait(has_ended, "the end of the run", END_S)

    def _wait(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        def looked() -> bool:
            self._host_fault.poll()
            return condition() or not any(job.is_running() for job in self.jobs)

        processes.wait_until(looked, what, timeout_s=timeout_s)

    def end(self) -> None:
        """All that still runs is a leftover, if the launchers have ended; else it is only ended."""
        self._host_fault.repair()
        has_ended = not any(job.is_running() for job in self.jobs)
        if has_ended:
            with contextlib.suppress(AssertionError):
                processes.wait_until(lambda: not self._pids(), "its processes", timeout_s=5)
            self.left_behind = [processes.command(pid) or str(pid) for pid in self._pids()]
        while pids := self._pids():
            processes.send(pids, signal.SIGKILL)
            time.sleep(0.05)
        for host in self._matrix.bed:
            for folder in Path(f"/proc/{host.space.pid}/root/dev/shm").glob("drumline*"):
                self.left_behind.append(f"/dev/shm/{folder.name} on {host.name}")
                shutil.rmtree(folder, ignore_errors=True)
        for case in self._cases:
            remove_control_group(notes_of(case, self._folder))

    def _pids(self) -> list[int]:
        return [
            pid for host in self._matrix.bed for pid in host.space.pids() if processes.command(pid)
        ]


def _unmount_orphans() -> None:
    """Small disks of soaks that were killed."""
    for line in Path("/proc/mounts").read_text().splitlines():
        source, folder, *_ = line.split()
        if source.startswith(DISK) and not processes.stat_fields(int(source.removeprefix(DISK))):
            subprocess.run(["umount", "--lazy", folder], check=False)


def notes_of(case: Case, folder: Path) -> Path:
    """Where a fault writes down that it struck."""
    return folder / f"notes-{case}"


def remove_control_group(notes: Path) -> None:
    if (group := inject.control_group(notes)).exists():
        group.rmdir()


def _judge(
    case: Case, said: list[reading.Said], steps: list[reading.Done], fired: float, result: Result
) -> None:
    said = [sentence for sentence in said if not reading.is_recovery(sentence)]
    if case.fault.restarts:
        said = [sentence for sentence in said if not reading.is_of_a_slow_start(sentence)]
    result.said = [vars(sentence) for sentence in said]
    if fired == math.inf:
        result.problems.append("the fault never struck")
        return
    if said:
        result.diagnosis_s = said[0].time - fired
        result.is_right = all(is_right(case, sentence) for sentence in said)
    # Restarts are counted by these: one that is told twice is taken for two. Of a link, each end
    # tells.
    allowed = 2 if case.fault.names == "either" else 1
    if (ends := sum(sentence.word in ("hang", "failure") for sentence in said)) > allowed:
        result.problems.append(f"the end was told {ends} times")
    if case.fault.restarts:
        how = reading.again(steps, fired)
        result.steps_lost = how.steps_lost
        result.new_step_s = None if how.first_new_step is None else how.first_new_step - fired
        # A save fails while the step after it is done.
        most_lost = EVERY + 1 if case.fault.ends_the_run else EVERY
        if how.steps_lost is not None and how.steps_lost > most_lost:
            result.problems.append(f"{how.steps_lost} steps were lost")


def is_right(case: Case, said: reading.Said) -> bool:
    """Whether a sentence names who it was and what it was."""
    if said.cause not in case.fault.causes or case.fault.says not in said.message:
        return False
    if case.fault.names == "rank":
        return said.rank == case.rank and said.host == case.host
    return said.host == case.host if case.fault.names == "host" else said.host in HOSTS

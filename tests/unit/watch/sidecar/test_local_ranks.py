"""What is observed of a rank from outside: its heartbeat, its state, its exit, its stacks, and its
workers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from drumline.base import processes
from drumline.base.processes import state_of
from drumline.base.untrusted import from_json
from drumline.watch import watch_folder
from drumline.watch.cluster_state import NodeState, RankState
from drumline.watch.diagnosis.evidence import BUSY_CORES, is_busy
from drumline.watch.heartbeat import HeartbeatWriter, Phase
from drumline.watch.sidecar.local_ranks import RankObserver
from drumline.watch.watch_folder import Ending, WatchFolder, note_ending
from tests.unit.watch.sidecar.conftest import StartRank, wait_until


def observer_of(folder: Path) -> RankObserver:
    return RankObserver(folder, 3, "node-b")


def state_seen(observer: RankObserver) -> RankState:
    state = observer.observe(time.monotonic())
    assert state is not None
    return state


def inspected(observer: RankObserver) -> RankState:
    begin = time.monotonic()
    state = asyncio.run(observer.inspect())
    assert time.monotonic() - begin < 5, "bounded, whatever the rank does"
    return state


def test_a_rank_that_sleeps_in_its_dataset(start_rank: StartRank, tmp_path: Path) -> None:
    observer = observer_of(tmp_path)
    assert observer.observe(time.monotonic()) is None, "there is no heartbeat yet"
    assert inspected(observer).pid == 0
    rank = start_rank(
        "class Images:\n    def __getitem__(self, index):\n        say('ready')\n        time.sleep(600)\nImages()[0]\n"
    )
    facts = state_seen(observer)
    assert (facts.rank, facts.host, facts.pid) == (3, "node-b", rank.pid)
    assert (facts.step, facts.phase, facts.num_marks) == (812, Phase.DATA, 1)
    wait_until(lambda: state_seen(observer).state == "S")
    time.sleep(0.2)
    later = state_seen(observer)
    assert later.age_s > facts.age_s
    assert later.state_s > 0
    assert later.cpu < 0.2
    assert len(later.spent_s) == len(Phase)
    assert (later.stack, later.answers) == ((), None)

    close = inspected(observer)
    assert (close.answers, close.collectives) == (True, ())
    line = len(Path(tmp_path / "job.py").read_text().splitlines())
    assert close.stack == (f"job.py:{line - 1} in __getitem__", f"job.py:{line} in <module>")
    assert inspected(observer).stack == close.stack, (
        "the file is begun again, and the sleep was not cut short"
    )
    assert (close.memory, close.workers, close.exit) == ("", (), None)
    node = NodeState(node=1, host="node-b", ranks=(close,))
    assert from_json(NodeState, asdict(node)) == node


def test_the_observer_counts_every_step_once(tmp_path: Path) -> None:
    observer = observer_of(tmp_path)
    writer = HeartbeatWriter(tmp_path / "rank-00003.heartbeat", rank=3)
    for step in range(30):
        writer.begin_step(step)
        if step % 7 == 0:
            state_seen(observer)
        time.sleep(0.5 if step == 25 else 0.001)
    state_seen(observer)
    times = observer.step_times.times()
    assert times is not None
    assert times.count == 27, "steps 2 to 28 are complete"
    assert times.longest[0].step == 25


def test_a_rank_that_is_stopped_is_not_signalled(start_rank: StartRank, tmp_path: Path) -> None:
    rank = start_rank("say('ready')\nwait_forever()\n")
    observer = observer_of(tmp_path)
    os.kill(rank.pid, signal.SIGSTOP)
    wait_until(lambda: state_seen(observer).state == "T")
    close = inspected(observer)
    assert (close.state, close.stack, close.answers) == ("T", (), False)
    for thread in processes.threads(rank.pid):
        status = processes.read_status(rank.pid, thread)
        assert int(status["SigPnd"], 16) | int(status["ShdPnd"], 16) == 0
    os.kill(rank.pid, signal.SIGCONT)
    wait_until(lambda: state_seen(observer).state == "S")
    assert state_seen(observer).state_s < close.state_s + 5
    assert inspected(observer).answers is True
    assert json.loads((tmp_path / "rank-00003.report.json").read_text())["number"] == 1, (
        "asked once"
    )
    # One that was stopped together with who looks at it has not been seen to be stopped all the
    # while.
    os.kill(rank.pid, signal.SIGSTOP)
    wait_until(lambda: state_seen(observer).state == "T")
    later = observer.observe(time.monotonic() + 100)
    assert later is not None
    assert (later.state, later.state_s < 50) == ("T", True)


def test_a_rank_that_answers_reports_its_own_stack_and_is_not_signalled(
    start_rank: StartRank, tmp_path: Path
) -> None:
    """Faulthandler reads the stacks of threads that run, such as this one, and may end the process
    by that."""
    rank = start_rank(
        "def dive(depth):\n    return depth and dive(depth - 1)\n"
        "def busy():\n    while True:\n        dive(200)\n"
        "threading.Thread(target=busy, daemon=True).start()\n"
        "say('ready')\nwait_forever()\n"
    )
    observer = observer_of(tmp_path)
    # The busy thread may hold it up on its way there.
    wait_until(lambda: inspected(observer).stack[0].endswith(" in wait_forever"))
    for _ in range(20):
        close = inspected(observer)
        assert (close.answers, close.stack[0].rpartition(" in ")[2]) == (True, "wait_forever")
    assert (tmp_path / "rank-00003.stacks").read_bytes() == b""
    assert rank.poll() is None


def test_a_rank_with_pythons_lock_held_shows_its_stack_and_does_not_answer(
    start_rank: StartRank, tmp_path: Path
) -> None:
    start_rank(
        "say('ready')\ndef sleeps_in_c():\n    ctypes.PyDLL(None).sleep(600)\nsleeps_in_c()\n"
    )
    observer = observer_of(tmp_path)
    # Before that it still runs, and would be asked itself.
    wait_until(lambda: (facts := state_seen(observer)).state == "S" and facts.state_s > 0.3)
    assert inspected(observer).answers is False
    close = inspected(observer)
    assert close.stack[0].endswith(" in sleeps_in_c")
    assert close.answers is False, "the call goes on: the signal went to another thread"


def test_a_rank_that_hangs_in_the_kernel(start_rank: StartRank, tmp_path: Path) -> None:
    """CLONE_VFORK suspends the caller, in state D, until the child ends; without CLONE_VM the child
    is a real one."""
    start_rank(
        "number = {'x86_64': 56, 'aarch64': 220}[os.uname().machine]\n"
        "def hang():\n"
        "    if ctypes.CDLL(None).syscall(number, 0x4000 | signal.SIGCHLD, 0, 0, 0, 0) == 0:\n"
        "        say('ready')\n"
        "        ctypes.CDLL(None).read(0, ctypes.create_string_buffer(1), 1)\n"
        "        os._exit(0)\n"
        "hang()\n"
    )
    observer = observer_of(tmp_path)
    assert state_seen(observer).state == "D"
    close = inspected(observer)
    assert (close.state, close.answers) == ("D", True)
    assert close.stack[0].endswith(" in hang"), "another thread answers for one in the kernel"


@pytest.mark.slow
def test_only_workers_of_the_loader_that_it_waits_for_are_workers(
    start_rank: StartRank, tmp_path: Path
) -> None:
    """Plain DataLoaders of torch, one after the other; beside the workers of the first are a helper
    that has ended, one that runs, and a program. That of the second is in fork."""
    rank = start_rank(
        "import subprocess\n"
        "from torch.utils.data import DataLoader\n"
        "import drumline.rank.torch_internals\n"
        "def wait_for_release():\n"
        "    while not Path(folder, 'released').exists():\n"
        "        time.sleep(0.5)\n"
        "class Images:\n"
        "    def __len__(self):\n"
        "        return 6\n"
        "    def __getitem__(self, index):\n"
        "        wait_for_release()\n"
        "        return index\n"
        "if os.fork() == 0:\n"
        "    os._exit(0)\n"
        "if os.fork() == 0:\n"
        "    wait_forever()\n"
        "subprocess.Popen(['sleep', '600'])\n"
        "batches = iter(DataLoader(Images(), num_workers=2, multiprocessing_context='fork'))\n"
        "for process in batches._workers:\n"
        "    Path(folder, f'worker-{process.pid}').touch()\n"
        "say('ready')\n"
        "list(batches)\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.__register_atfork(None, None, libc.pause, None)\n"
        "batches = iter(DataLoader(range(6), num_workers=1, multiprocessing_context='fork'))\n"
        "Path(folder, 'second').touch()\n"
        "next(batches)\n"
    )
    observer = observer_of(tmp_path)
    wait_until(lambda: any("_try_get_data" in frame for frame in inspected(observer).stack))
    first, second = sorted(int(path.name.partition("-")[2]) for path in tmp_path.glob("worker-*"))
    assert len(processes.children(rank.pid)) == 5
    os.kill(second, signal.SIGSTOP)
    wait_until(lambda: state_of(second) == "T")
    workers = inspected(observer).workers
    assert [(worker.number, worker.pid, worker.state) for worker in workers] == [
        (0, first, "S"),
        (1, second, "T"),
    ]
    assert [frame.rpartition(" in ")[2] for frame in workers[0].stack[:2]] == [
        "wait_for_release",
        "__getitem__",
    ]
    assert workers[1].stack == ()
    assert workers[0].in_fork_s == workers[1].in_fork_s == 0
    os.kill(second, signal.SIGCONT)
    (tmp_path / "released").touch()
    wait_until((tmp_path / "second").exists)
    check_that_a_worker_in_fork_is_not_signalled(observer)


def check_that_a_worker_in_fork_is_not_signalled(observer: RankObserver) -> None:
    """A signal would wake it from the pause, as it ended the one that waited for Python's lock."""
    wait_until(lambda: any("_try_get_data" in frame for frame in inspected(observer).stack))
    (first,), (later,) = inspected(observer).workers, inspected(observer).workers
    assert (
        (first.pid, first.state, first.stack)
        == (later.pid, later.state, later.stack)
        == (first.pid, "S", ())
    )
    assert 0 < first.in_fork_s < later.in_fork_s


@pytest.mark.slow
def test_cpu_time_includes_descendants_when_a_rank_makes_no_progress(
    start_rank: StartRank, tmp_path: Path
) -> None:
    start_rank("if os.fork() == 0:\n    while True: pass\nsay('ready')\nwait_forever()\n")
    observer = observer_of(tmp_path)
    state_seen(observer)
    readings: list[float] = []

    def computes() -> bool:
        time.sleep(0.2)
        readings.append(state_seen(observer).cpu)
        return readings[-1] > BUSY_CORES

    wait_until(computes)
    assert readings[0] < 0.2, "a rank that may still move is looked at alone"
    assert inspected(observer).workers == (), (
        "a process that it has forked is no DataLoader worker for that"
    )
    for _ in range(6):
        time.sleep(0.22)
        assert not state_seen(observer).has_io, "its answers to us are not its own work"


@pytest.mark.slow
def test_cpu_is_measured_over_an_interval(start_rank: StartRank, tmp_path: Path) -> None:
    """A rank that gets the CPU now and then, as on a busy machine; a look may find it without."""
    start_rank(
        "say('ready')\n"
        "while True:\n"
        "    until = time.thread_time() + 0.12\n"
        "    while time.thread_time() < until: pass\n"
        "    time.sleep(0.5)\n"
    )
    observer = observer_of(tmp_path)
    wait_until(lambda: time.sleep(0.2) or state_seen(observer).cpu > 0)
    for _ in range(8):
        time.sleep(0.2)
        state_seen(observer)
    readings = []
    for _ in range(12):
        time.sleep(0.2)
        readings.append(state_seen(observer).cpu)
    assert min(readings) > 0.03, readings


def test_a_rank_that_computes_and_one_that_reads(start_rank: StartRank, tmp_path: Path) -> None:
    start_rank("say('ready')\nsys.stdin.read(1)\nwhile True:\n    open('/proc/self/stat').read()\n")
    observer = observer_of(tmp_path)
    state_seen(observer)
    for _ in range(6):  # until it counts as one that stands still
        time.sleep(0.22)
        idle = state_seen(observer)
    assert idle.cpu < BUSY_CORES
    assert not idle.has_io
    process = start_rank.started[0]
    assert process.stdin is not None
    process.stdin.write("x")
    process.stdin.flush()
    wait_until(lambda: state_seen(observer).cpu > BUSY_CORES)
    assert state_seen(observer).has_io
    wait_until(lambda: inspected(observer).stack[-1:] != ())


@pytest.fixture(name="crowd")
def _crowd() -> Iterator[None]:
    """Every CPU is taken by processes with a higher priority than a rank of nice 19."""
    loops = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(3 * (os.cpu_count() or 1))
    ]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


@pytest.mark.usefixtures("crowd")
def test_a_rank_that_computes_on_a_crowded_machine_is_busy_and_does_not_hold_the_gil(
    start_rank: StartRank, tmp_path: Path
) -> None:
    rank = start_rank("say('ready')\nwhile True:\n    sum(range(100))\n")
    os.setpriority(os.PRIO_PROCESS, rank.pid, 19)
    observer = observer_of(tmp_path)
    wait_until(lambda: state_seen(observer).is_starved)
    assert is_busy(state_seen(observer))
    assert inspected(observer).answers is not False, "it may be late, or have answered"


@pytest.mark.usefixtures("crowd")
@pytest.mark.parametrize("body", ["wait_forever()", "ctypes.PyDLL(None).sleep(600)"])
def test_a_rank_that_waits_on_a_crowded_machine_is_not_busy(
    start_rank: StartRank, tmp_path: Path, body: str
) -> None:
    rank = start_rank(f"say('ready')\n{body}\n")
    os.setpriority(os.PRIO_PROCESS, rank.pid, 19)
    observer = observer_of(tmp_path)
    states = []
    for _ in range(20):
        time.sleep(0.2)
        states.append(state_seen(observer))
    assert not any(state.is_starved for state in states[10:])
    if "PyDLL" in body:
        assert inspected(observer).answers is False, "it holds the GIL, and would have had a CPU"
        assert not state_seen(observer).is_starved


def test_how_a_rank_ended(start_rank: StartRank, tmp_path: Path) -> None:
    rank = start_rank("say('ready')\nwait_forever()\n")
    observer = observer_of(tmp_path)
    state_seen(observer)
    fd = observer.fileno()
    assert fd is not None
    ended = asyncio.run(_kill_and_await(rank.pid, fd))
    assert ended
    wait_until(lambda: state_seen(observer).state == "Z")
    assert state_seen(observer).exit == -signal.SIGSEGV
    rank.wait()
    assert (state_seen(observer).state, state_seen(observer).exit) == ("X", -signal.SIGSEGV), (
        "remembered from before"
    )
    close = inspected(observer)
    assert (close.state, close.answers, close.memory) == ("X", None, "")
    # It may still be on its way out of the line that said that it is ready.
    assert close.stack[0].endswith((" in wait_forever", " in say")), "where a fatal signal met it"
    unseen = state_seen(observer_of(tmp_path))
    assert (unseen.state, unseen.exit) == ("X", None), "nobody knows how"
    (tmp_path / "exit-00003").write_text("-11\n")
    assert state_seen(observer_of(tmp_path)).exit == -signal.SIGSEGV
    observer.close()
    assert observer.fileno() is None


def test_a_rank_that_its_launcher_killed_after_the_grace_period(
    start_rank: StartRank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = WatchFolder.__new__(WatchFolder)
    watch.current = tmp_path
    rank = start_rank("say('ready')\nwait_forever()\n")
    observer = observer_of(tmp_path)
    state_seen(observer)
    watch.note_ending(3600.0)
    rank.kill()
    wait_until(lambda: state_seen(observer).state == "Z")
    assert state_seen(observer).exit == -signal.SIGKILL
    assert state_seen(observer).killed_after_s is None, "someone else was earlier"
    exited_s = time.monotonic()
    monkeypatch.setattr(watch_folder.time, "monotonic", lambda: exited_s - 15.0)
    watch.note_ending(10.0, why="node 1 (b) restarted")
    monkeypatch.undo()
    state = state_seen(observer)
    assert (state.killed_after_s, state.killed_by, state.killed_because) == (
        10.0,
        "launcher",
        "node 1 (b) restarted",
    )
    watch.note_ending(0.0, why="for another reason")
    assert state_seen(observer).killed_because == "node 1 (b) restarted", (
        "it had been killed already"
    )


def test_a_rank_that_its_launcher_asked_to_exit(start_rank: StartRank, tmp_path: Path) -> None:
    watch = WatchFolder.__new__(WatchFolder)
    watch.current = tmp_path
    watch._written = set()
    rank = start_rank("say('ready')\nwait_forever()\n")
    observer = observer_of(tmp_path)
    state_seen(observer)
    watch.note_ending(30.0)
    rank.kill()
    rank.wait()
    wait_until(lambda: state_seen(observer).state == "X")
    assert state_seen(observer).asked_to_exit
    # The launcher ends the ranks that are left in other ways, too.
    watch.note_ending(0.0, why="node 1 (b) is lost")
    assert state_seen(observer).asked_to_exit
    watch.note_exit(3, -signal.SIGSEGV)
    assert not state_seen(observer).asked_to_exit, "it had exited before"


def test_a_rank_that_is_killed_at_once_by_drumline(start_rank: StartRank, tmp_path: Path) -> None:
    watch = WatchFolder.__new__(WatchFolder)
    watch.current = tmp_path
    rank = start_rank("say('ready')\nwait_forever()\n")
    observer = observer_of(tmp_path)
    state_seen(observer)
    watch.note_ending(0.0, why="node 1 (b) is lost")
    rank.kill()
    wait_until(lambda: state_seen(observer).state == "Z")
    state = state_seen(observer)
    assert (state.exit, state.killed_after_s, state.killed_because) == (
        -signal.SIGKILL,
        0.0,
        "node 1 (b) is lost",
    )


async def _kill_and_await(pid: int, fd: int) -> bool:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(fd, ended.set)
    os.kill(pid, signal.SIGSEGV)
    await asyncio.wait_for(ended.wait(), 20)
    asyncio.get_running_loop().remove_reader(fd)
    return ended.is_set()


def test_an_exit_code_and_a_last_line(start_rank: StartRank, tmp_path: Path) -> None:
    rank = start_rank("say('ready')\nheartbeat.fail('ValueError: no')\nsys.exit(3)\n")
    observer = observer_of(tmp_path)
    wait_until(lambda: state_seen(observer).state == "Z")
    facts = inspected(observer)
    assert (facts.exit, facts.failure, facts.phase) == (3, "ValueError: no", Phase.FAILED)
    rank.wait()


def test_a_rank_that_vanishes_while_it_is_looked_at(start_rank: StartRank, tmp_path: Path) -> None:
    rank = start_rank("ctypes.PyDLL(None).system(b'echo ready; sleep 600')\n")
    observer = observer_of(tmp_path)
    state_seen(observer)
    assert observer._process is not None
    observer._process.state_since_s -= 60.0  # it has been asleep for a minute

    async def look_and_kill() -> RankState:
        looking = asyncio.create_task(observer.inspect())
        await asyncio.sleep(0.02)  # it waits for the first answer
        note_ending(tmp_path, Ending(time.monotonic(), 0.0, why="node 1 (b) is lost"))
        rank.kill()
        rank.wait()
        return await looking

    facts = asyncio.run(look_and_kill())
    assert (facts.state, facts.step, facts.answers) == ("X", 812, None)
    assert facts.state_s < 30, "it has only just exited"
    assert (facts.asked_to_exit, facts.killed_because) == (True, "node 1 (b) is lost")


def test_a_host_on_which_processes_start_slowly_is_known() -> None:
    code = (
        "import sys, time; time.sleep({}); from drumline.watch.sidecar.local_ranks import start_slowdown; "
        "print(start_slowdown(), time.process_time())"
    )
    usual, _ = map(float, subprocess.check_output([sys.executable, "-c", code.format(0)]).split())
    assert usual >= 1.0
    late, cpu_s = map(
        float, subprocess.check_output([sys.executable, "-c", code.format(2)]).split()
    )
    assert late >= 2.0 / cpu_s, "it took so many times its CPU time"


def test_a_sidecar_needs_neither_torch_nor_numpy() -> None:
    code = "import sys, drumline.watch.sidecar.main; "
    code += "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'rich')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

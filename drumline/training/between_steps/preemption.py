"""On SIGTERM, SIGUSR1 or a notice, a run finishes its step, saves and exits, so that the same
command resumes it.

A thread of each rank receives signals over a pipe, at any moment, and agrees with the threads of
the other ranks on the step to stop at (`rank/stop_vote.py`). It owns the state
(`StopRequestWatcher`); the main thread has `Preemption`, and reads `is_asked` after each step. This
is only for ranks of `drumline train`; in a user's own loop signals are not handled.

From SIGTERM to exit code 75:
1. The launcher passes it on to its ranks: `RankSignals` (`launch/node/rank_exchange.py`) raises
   torch's SignalException, and torch's agent sends it to them (`_shutdown` in
   `launch/node/agent.py`). SIGUSR1 it sends itself.
2. In each rank the signal wakes the `StopRequestWatcher`, which requests a vote; the ranks agree
   on a step.
3. After that step `Preempt`, the last of the actions, saves; `report_preemption` writes
   `preempted.json`, and the rank exits with 75 (`report_result` in `training/run.py`).
4. The agent reads that its ranks have saved (`run_agent` in `launch/node/agent.py`), and the
   launcher exits with 75 (`launch/node/local.py`); if one has not, with 130.
A second SIGTERM, 2 s later, ends a rank at once with 143.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist

from drumline.base.background import in_background
from drumline.base.errors import ExitCode, log
from drumline.base.processes import EXITED, state_of
from drumline.base.rank_environment import grace_from, note_saved
from drumline.base.startup import SAME_SIGNAL_S
from drumline.base.text import named_ranks, print_message
from drumline.rank.failure import FIRST
from drumline.rank.sealed_store import SealedStore
from drumline.rank.stop_vote import StopVote
from drumline.runs.run_folder import write_whole
from drumline.training.between_steps.non_finite import NonFinite
from drumline.training.between_steps.saver import Saver
from drumline.training.job.job import Progress
from drumline.training.manager import RunManager
from drumline.training.output import screen
from drumline.training.run_context import Action, RunContext

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
POLL_S = 0.5
BUSY_POLL_S = 0.05
# A scheduler that stops a whole job signals all of its nodes within this time.
ALL_NODES_S = 3.0
FLUSH_S = 1.0
# Most launchers kill their ranks 30 seconds after the signal.
MAX_WAIT_FOR_SAVE_S = 20.0
# Part of a known grace period that is left for the exit of the rank.
EXIT_SHARE = 0.2


class SignalPipe:
    """Signals, received by a thread over a pipe. Python runs a signal handler only when its main
    thread returns to the interpreter, which may never happen in a collective; the pipe is written
    at once.

    From `__init__` to `close`, both in the main thread, these signals have no other effect."""

    def __init__(self, signals: Sequence[signal.Signals]) -> None:
        self._out, self._in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._is_open = True
        signal.set_wakeup_fd(self._in, warn_on_full_buffer=False)
        self._before: dict[int, Any] = {}

        for number in signals:
            # Only signals that have a handler are written to the pipe.
            self._before[number] = signal.signal(number, lambda *_: None)
            signal.siginterrupt(number, False)

        os.register_at_fork(after_in_child=self._restore_in_child)

    def wait(self, timeout_s: float) -> list[int]:
        """The signals that arrived, at the latest after this time."""
        if not select.select([self._out], [], [], timeout_s)[0]:
            return []
        return [number for number in os.read(self._out, 256) if number in self._before]

    def wake(self) -> None:
        """End a `wait` in another thread."""
        with suppress(BlockingIOError):
            os.write(self._in, b"\0")

    def close(self, *, restore: bool) -> None:
        """`restore` the earlier handlers; otherwise the signals are ignored from now on."""
        self._is_open = False
        signal.set_wakeup_fd(-1)
        if restore:
            self._restore()

        os.close(self._in)
        os.close(self._out)

    def _restore_in_child(self) -> None:
        """A forked child (a DataLoader worker) shares the pipe, but signals to it must not stop the
        run."""
        if self._is_open:
            signal.set_wakeup_fd(-1)
            self._restore()

    def _restore(self) -> None:
        """Every signal has its earlier handler again."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


class StopGroup:
    """The ranks that stop together, in their store."""

    def __init__(
        self, ddp: RunManager, store: SealedStore, progress: Progress, *, may_leave: bool
    ) -> None:
        """`may_leave`: if not all nodes are asked to stop, the others continue."""
        node = ddp.rank // ddp.local_world_size

        # A host may have several nodes; srun may scatter ranks.
        where = node if may_leave else ddp.host
        store.set(f"pid/{where}/{ddp.get_local_rank()}", str(os.getpid()))
        self.may_leave = may_leave
        self.store = store.clone()

        self.vote = StopVote(
            self.store, rank=ddp.rank, world_size=ddp.world_size, step=lambda: progress.step
        )

        self.own_node = f"asked/{node}"
        num_nodes = ddp.world_size // ddp.local_world_size if may_leave else 0
        self.nodes = [f"asked/{number}" for number in range(num_nodes)]
        """Where nodes continue without each other: for each one, where it writes that it was asked
        to stop."""

        self.node_asked_at = math.inf
        self._local_ranks = [f"pid/{where}/{rank}" for rank in range(ddp.local_world_size)]
        self.local_pids: list[int] = []

    def has_lost_a_local_rank(self) -> bool:
        """Whether a rank of this host has exited."""
        if len(self.local_pids) < len(self._local_ranks):
            self.local_pids = list(map(int, self.store.there(self._local_ranks).values()))
        return any(state_of(pid) in EXITED for pid in self.local_pids)

    def request(self, cause: dict[str, Any], *, in_a_hurry: bool) -> None:
        """Ask all ranks to stop; where nodes may leave, first say only that this node was asked."""
        if len(self.nodes) > 1:
            self.store.set(self.own_node, json.dumps(cause))
        else:
            self.vote.request(cause, in_a_hurry=in_a_hurry)


class StopRequestWatcher:
    """Watches for what may ask this rank to stop: signals, notices and the votes of other ranks. It
    owns all that they change: only its thread does so. What the main thread has to say comes as
    events in a queue, which is emptied before signals are handled; it reads `is_asked_alone`,
    `reason` and `first_signal`."""

    def __init__(self) -> None:
        self.events: SimpleQueue[Callable[[], object]] = SimpleQueue()
        """Methods of this object, to be called by its thread."""

        self.pipe: SignalPipe | None = None
        self.prints = False
        self.is_asked_alone = False
        """Whether this process, which is in no group, was asked to stop."""

        self.reason: dict[str, Any] = {}
        """By which signal or notice this rank was asked, and when."""

        self.received_at = 0.0
        """When that was, on the monotonic clock."""

        self.first_signal: int | None = None
        """A spot notice (`--watch.notice`) is not a signal: a signal after it counts as the
        first."""

        self.place: dict[str, Any] = {}
        """The host and the rank, once there is a group or this process trains alone."""

        self._group: StopGroup | None = None
        self.is_between_groups = False
        """Nodes have changed: the next group decides what a signal means."""

        self.is_writing: Callable[[], bool] = lambda: False
        """Whether this rank is writing a checkpoint."""

        self.is_closed = False
        """Signals are ignored: all is saved, or the run has ended. A launcher may signal the last
        ranks when the first exit."""

        self._has_warned = False

    @property
    def is_sigterm(self) -> bool:
        """Whether the first signal was SIGTERM, after which the sender waits only for a short
        time."""
        return self.first_signal == signal.SIGTERM

    # Events

    def join(self, place: dict[str, Any], group: StopGroup | None) -> None:
        """A group has begun, or this process trains alone. What it was asked before counts in it."""
        self.place = place
        if group is not None and self._group is not None:
            # the processes of a node stay the same
            group.local_pids = self._group.local_pids

        self._group = group
        self.is_between_groups = False
        if self.reason:
            self._request()

    def take_notice(self, notice: str) -> None:
        """A notice says that the machine will be reclaimed."""
        if not self.reason:
            self.reason = {"signal": notice, "time": time.time()}
            self._request()

    # The thread

    def run(self) -> None:
        """Until `close`: wait for signals, and handle what has happened."""
        assert self.pipe is not None
        timeout = POLL_S
        while not self.is_closed:
            is_busy = self.turn(self.pipe.wait(timeout))
            timeout = BUSY_POLL_S if is_busy else POLL_S

    def turn(self, signals: Sequence[int] = ()) -> bool:
        """Handle all that has happened. True: more is due soon."""
        self._take_events()
        for number in signals:
            self._receive(number)
        return self._with_store(self._tick)

    def _take_events(self) -> None:
        """Call what the main thread has queued."""
        while not self.events.empty():
            self.events.get()()

    def _receive(self, number: int) -> None:
        """The first signal asks the run to stop; a second SIGTERM ends this rank."""
        now = time.monotonic()
        if self.is_closed:
            return

        if self.first_signal is not None:
            # The sender of SIGUSR1 allows time, and a launcher that passes it on may be slow.
            if number == signal.SIGTERM and now - self.received_at > SAME_SIGNAL_S:
                # Safe at any moment: a checkpoint is complete or does not exist.
                os._exit(128 + number)
            return

        self.first_signal = number
        self.received_at = now
        name = signal.Signals(number).name
        self.reason = self.reason or {"signal": name, "time": time.time()}

        if self.place:
            self._request()
            return

        if self.prints:
            print_message(
                f"stopped by {name} before the first step; rerun the same command to resume"
            )

        os._exit(ExitCode.PREEMPTED)

    def _request(self) -> None:
        """Pass on that this rank was asked to stop."""
        if self._group is None:
            self.is_asked_alone = True
        else:
            self._with_store(self._request_vote)

    def _request_vote(self) -> None:
        """Ask the group, unless it is already ending."""
        group = self._group
        assert group is not None

        is_left = self.is_between_groups
        if self.is_sigterm and (
            group.has_lost_a_local_rank() or (not is_left and group.store.check([FIRST]))
        ):
            # Another rank has failed, and the launcher ends this one.
            self._exit(128 + signal.SIGTERM)

        if not is_left:
            group.request({**self.reason, **self.place}, in_a_hurry=self.is_sigterm)

    def _tick(self) -> bool:
        """Do this rank's part of the vote. True: more is due soon."""
        group = self._group
        if group is None or self.is_between_groups or self.is_closed:
            return False

        if len(group.nodes) > 1:
            self._leave_if_asked(group)

        is_busy = group.vote.tick()
        if group.vote.is_decided and group.vote.stop is None:
            self._report_cancelled(group.vote)
            self._give_up()

        return is_busy

    def _leave_if_asked(self, group: StopGroup) -> None:
        """If this node was asked to stop: if all were, they save and stop together; otherwise it
        exits alone."""
        if (request := group.store.peek(group.own_node)) is None:
            return

        cause = json.loads(request)
        group.node_asked_at = min(group.node_asked_at, time.monotonic())
        if group.store.check(group.nodes):
            group.nodes = []
            group.request(cause, in_a_hurry=self.is_sigterm)
        elif time.monotonic() > group.node_asked_at + ALL_NODES_S:
            # the last one of this node that was asked
            if cause["rank"] == self.place["rank"]:
                print_message(
                    f"{cause['host']} received {cause['signal']} and leaves; the other nodes continue without it",
                    stream=screen(),
                )

            # What the task has printed; it may block.
            wait([in_background(sys.stdout.flush)], timeout=FLUSH_S)
            self._exit(ExitCode.PREEMPTED)

    def _report_cancelled(self, vote: StopVote) -> None:
        """Some ranks did not answer; the one that asked names them."""
        cause = vote.cause
        if cause is None or cause["rank"] != self.place["rank"]:
            return

        who = named_ranks(vote.missing_ranks())
        if self.first_signal is not None:
            print_message(
                f"rank {cause['rank']} on {cause['host']} received {cause['signal']} and exits without a save: {who} "
                "did not answer",
                f"try: find out what blocks {who}; rerun the same command to resume from the newest checkpoint",
                stream=screen(),
            )
        elif not self._has_warned:
            self._has_warned = True
            log.warning(
                f"received {cause['signal']}, but {who} did not answer: the run continues; if the machine is "
                "reclaimed, the steps after the newest checkpoint are lost"
            )

    def _with_store(self, action: Callable[[], bool | None]) -> bool:
        """Run an action that uses the store, which is lost when its process exits."""
        try:
            return bool(action())
        except (dist.DistError, RuntimeError):  # the process with the store has exited
            assert self._group is not None
            self._group.vote.abandon()
            if self._group.may_leave:
                self.is_between_groups = True
            else:
                self._give_up()
            return False

    def _give_up(self) -> None:
        """The group cannot stop together: exit without a save if a signal asked for that."""
        self._take_events()  # the run may have ended meanwhile
        if self.first_signal is not None and not self.is_closed:
            self._exit(128 + self.first_signal)

    def _exit(self, code: int) -> None:
        """Exit when the checkpoint that is being written is complete, if that is soon; at a second
        signal, at once."""
        deadline = time.monotonic() + MAX_WAIT_FOR_SAVE_S
        while self.pipe is not None and self.is_writing() and time.monotonic() < deadline:
            for number in self.pipe.wait(BUSY_POLL_S):
                self._receive(number)
        os._exit(code)


class Preemption:
    """The main thread's side. One for every run; without `listen` it never stops the run."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """`environment`: where a launcher says how long it waits after a SIGTERM, and where a save
        is reported to it."""
        self.environment = environment or {}
        self.watcher = StopRequestWatcher()
        self._vote: StopVote | None = None
        self.is_saved = False

        self._thread = threading.Thread(
            target=self.watcher.run, name="drumline-preemption", daemon=True
        )

    @property
    def is_asked(self) -> bool:
        """Whether a step to stop at is proposed, or this process alone was asked: the only thing
        that the loop reads after each step."""
        if self._vote is None:
            return self.watcher.is_asked_alone
        return self._vote.stop is not None

    @property
    def cause(self) -> dict[str, Any]:
        """Which rank was asked, by which signal, when."""
        if self._vote is not None and self._vote.cause is not None:
            return self._vote.cause
        return {**self.watcher.reason, **self.watcher.place}

    def listen(self, *, prints: bool) -> None:
        """Call it from the main thread, as early as possible. `prints`: whether this rank reports
        an early stop."""
        self.watcher.prints = prints
        self.watcher.pipe = SignalPipe(SIGNALS)
        self._thread.start()

    def join(self, ddp: RunManager, progress: Progress, *, may_leave: bool = False) -> None:
        """Called when a group exists: from now on all ranks stop together. `may_leave`: if not all
        nodes are asked to stop, the others continue."""
        group = None
        store = ddp.connection.store
        if self.watcher.pipe is not None and store is not None:
            group = StopGroup(ddp, store, progress, may_leave=may_leave)
            self._vote = group.vote

        place = {"host": ddp.host, "rank": ddp.rank}
        self.watcher.events.put(partial(self.watcher.join, place, group))

    def begin(self) -> None:
        """Called before the first step."""
        if self._vote is not None:
            self._vote.begin()

    def stops_at(self, step: int) -> bool:
        """Whether the run ends after this step; waits while the ranks agree on that."""
        return self.is_asked and (self._vote is None or self._vote.stops_at(step))

    def leave_group(self) -> None:
        """Nodes have changed, and the next group has not begun."""
        self._set("is_between_groups", True)

    def notice(self, text: str) -> None:
        """From any thread, once the group exists: stop the run, for this reason."""
        self.watcher.events.put(partial(self.watcher.take_notice, text))

    def write_with(self, is_writing: Callable[[], bool]) -> None:
        """`is_writing`: whether this rank is writing a checkpoint."""
        self._set("is_writing", is_writing)

    def _set(self, name: str, value: Any) -> None:
        """Set an attribute of the watcher, in its thread."""
        self.watcher.events.put(partial(setattr, self.watcher, name, value))

    def time_left_s(self) -> float:
        """How long a run that has saved may still upload: the launcher kills ranks some time after
        a SIGTERM."""
        grace_s = grace_from(self.environment)
        if grace_s is None or not self.watcher.is_sigterm:
            return MAX_WAIT_FOR_SAVE_S
        passed_s = time.monotonic() - self.watcher.received_at
        return max(0.0, (1 - EXIT_SHARE) * grace_s - passed_s)

    def end_saved(self) -> None:
        """All is saved: signals are ignored from now on."""
        self.is_saved = True
        self._set("is_closed", True)

    def close(self) -> None:
        """Call it from the main thread, before the group is destroyed. May be called twice."""
        pipe = self.watcher.pipe
        if pipe is None:
            return

        self._set("is_closed", True)
        pipe.wake()
        self._thread.join()
        pipe.close(restore=not self.is_saved)
        self.watcher.pipe = None


@dataclass
class Preempt(Action):
    """When any rank has received a signal or a notice: at the step that all agree on, save and end
    the run."""

    name = "preempt"
    interval = 0
    preemption: Preemption
    saver: Saver
    comparison: Action
    """Of the replicas: runs before the save."""

    non_finite: NonFinite

    def start(self, context: RunContext) -> None:
        """A request may have come before the first step."""
        self.preemption.begin()
        self.run(context)

    def due(self, step: int) -> bool:
        return self.preemption.is_asked

    def run(self, context: RunContext) -> None:
        """Collective at the step at which the ranks have agreed to stop: save, and end the run."""
        step = context.progress.step
        # At its last step the run ends as usual.
        if step >= context.progress.last_step or not self.preemption.stops_at(step):
            return

        context.progress.is_stopping = True
        if self.saver.saved_step != step:
            # also reports updates that were skipped since the last log line
            self.non_finite.read()
            self.comparison.run(context)
            self.saver.save_step({}, must_save=True)


def report_preemption(context: RunContext, preemption: Preemption) -> None:
    """Collective: write preempted.json, report, and wait for all ranks, so that none exits before
    all is written."""
    ddp = context.job.ddp
    step = context.progress.step
    cause = preemption.cause

    if ddp.is_main_process():
        write_whole(
            context.folder.preempted_file, json.dumps({"step": step, **cause}, indent=1) + "\n"
        )
        # the other ranks know only after the barrier
        note_saved(preemption.environment)

    context.reporter.report(
        "preempted",
        step=step,
        signal=cause["signal"],
        about_rank=cause["rank"],
        about_host=cause["host"],
    )

    preemption.end_saved()
    ddp.barrier()
    note_saved(preemption.environment)

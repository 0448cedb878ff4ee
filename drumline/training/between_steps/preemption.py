"""On SIGTERM, SIGUSR1 or a notice, a run finishes its step, saves and exits, so that the same
command resumes it.

A thread of each rank receives signals over a pipe, at any moment, and agrees with the threads of
the other ranks on the step to stop at (`rank/stop_vote.py`). The training loop reads one attribute,
`is_asked`, after each step. This is only for ranks of `drumline train`; in a user's own loop
signals are not handled.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from drumline.base.background import in_background
from drumline.base.errors import ExitCode, log
from drumline.base.processes import EXITED, state_of
from drumline.base.rank_environment import grace_from, note_saved
from drumline.base.startup import SAME_SIGNAL_S
from drumline.base.terminal import print_message
from drumline.base.text import named_ranks
from drumline.rank.failure import FIRST
from drumline.rank.sealed_store import SealedStore
from drumline.rank.stop_vote import StopVote
from drumline.runs.run_folder import write_whole
from drumline.training.between_steps.actions import Action, CompareReplicas
from drumline.training.between_steps.non_finite import NonFinite
from drumline.training.between_steps.saver import Saver
from drumline.training.job.job import Progress
from drumline.training.manager import RunManager
from drumline.training.output import screen
from drumline.training.run_context import RunContext
from drumline.training.spot_notice import make_probe

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
BEFORE_FIRST_STEP = "stopped by {} before the first step; rerun the same command to resume"
EXITS_WITHOUT_SAVE = (
    "rank {rank} on {host} received {signal} and exits without a save: {who} did not answer",
    "try: find out what blocks {who}; rerun the same command to resume from the newest checkpoint",
)
LEAVES = "{host} received {signal} and leaves; the other nodes continue without it"
NOTICE_IGNORED = (
    "received {signal}, but {who} did not answer: the run continues; if the machine is reclaimed, the steps after the "
    "newest checkpoint are lost"
)


class Preemption:
    """One for every run; without `listen` it never stops the run."""

    def __init__(self) -> None:
        self.is_asked = False
        """Whether any rank was asked to stop: the only attribute that the loop reads after each
        step."""
        self.cause: dict[str, Any] = {}
        """Which rank was asked, by which signal, when."""
        self.is_writing: Callable[[], bool] = lambda: False
        """Whether this rank is writing a checkpoint."""
        self._prints = False
        self._vote: StopVote | None = None
        self._store: SealedStore | None = None
        self._first: tuple[int, float] | None = None
        self.notice: str | None = None
        """Set from any thread, once the group exists: stop the run, for this reason. A spot notice
        (`--watch.notice`) is not a signal: a signal after it counts as the first."""
        self._has_warned = False
        self._local_ranks: list[str] = []
        self._local_pids: list[int] = []
        self._may_leave = False
        self._nodes = list[str]()
        self._own_node = ""
        """Where nodes continue without each other: for each one, where it writes that it was asked
        to stop."""
        self._node_asked_at = math.inf
        self.is_between_groups = False
        """Whether nodes have changed, and the next group has not begun: it then decides what a
        signal means."""
        self.environment: Mapping[str, str] = {}
        """Where a launcher says how long it waits after a SIGTERM, and where a save is reported to
        it."""
        self.ignores_signals = False
        """Whether all is saved: then signals are ignored. A launcher may signal the last ranks when
        the first exit."""
        self._is_joined = False
        self._is_closed = False
        self._place: dict[str, Any] = {}
        self._pipe: SignalPipe | None = None
        self._thread = threading.Thread(
            target=self._listen, name="drumline-preemption", daemon=True
        )

    def listen(self, *, prints: bool) -> None:
        """Call it from the main thread, as early as possible. `prints`: whether this rank reports
        an early stop."""
        self._prints = prints
        self._pipe = SignalPipe(SIGNALS)
        self._thread.start()

    def join(self, ddp: RunManager, progress: Progress, *, may_leave: bool = False) -> None:
        """Called when a group exists: from now on all ranks stop together. `may_leave`: if not all
        nodes are asked to stop, the others continue."""
        is_own = bool(self.cause) and self.cause.get("rank") == self._place.get("rank")
        self._place = {"host": ddp.host, "rank": ddp.rank}
        self.cause |= self._place if is_own else {}  # ranks are numbered anew
        if self._pipe is not None and ddp.connection.store is not None:
            node = ddp.rank // ddp.local_world_size
            self._may_leave = may_leave
            # A host may have several nodes; srun may scatter ranks.
            where = node if may_leave else ddp.host
            ddp.connection.store.set(f"pid/{where}/{ddp.get_local_rank()}", str(os.getpid()))
            self._local_ranks = [f"pid/{where}/{rank}" for rank in range(ddp.local_world_size)]
            self._store = ddp.connection.store.clone()
            self._vote = StopVote(
                self._store, rank=ddp.rank, world_size=ddp.world_size, step=lambda: progress.step
            )
            self._own_node = f"asked/{node}"
            self._nodes = [
                f"asked/{number}"
                for number in range(ddp.world_size // ddp.local_world_size)
                if may_leave
            ]
            self.is_between_groups = False
            if self.cause:  # in the group before
                self._request()
        self._is_joined = True

    def begin(self) -> None:
        """Called before the first step."""
        if self._vote is not None:
            self._vote.begin()
            if self._may_leave:  # it must be known without a store, too
                self._with_store(self._has_lost_a_local_rank)

    def stops_at(self, step: int) -> bool:
        """Whether the run ends after this step; waits while the ranks agree on that."""
        return self.is_asked and (self._vote is None or self._vote.stops_at(step))

    def time_left_s(self) -> float:
        """How long a run that has saved may still upload: the launcher kills ranks some time after
        a SIGTERM."""
        grace_s = grace_from(self.environment)
        if grace_s is None or self._first is None or self._first[0] != signal.SIGTERM:
            return MAX_WAIT_FOR_SAVE_S
        passed_s = time.monotonic() - self._first[1]
        return max(0.0, (1 - EXIT_SHARE) * grace_s - passed_s)

    def close(self) -> None:
        """Call it from the main thread, before the group is destroyed. May be called twice."""
        self._is_closed = True
        if self._pipe is None:
            return
        self._pipe.wake()
        self._thread.join()
        self._pipe.close(restore=not self.ignores_signals)
        self._pipe = None

    def _listen(self) -> None:
        assert self._pipe is not None
        timeout = POLL_S
        while not self._is_closed:
            for number in self._pipe.wait(timeout):
                self._receive(number)
            if self.notice is not None and not self.cause:
                self.cause = {"signal": self.notice, **self._place, "time": time.time()}
                self._request()
            timeout = BUSY_POLL_S if self._with_store(self._tick) else POLL_S

    def _receive(self, number: int) -> None:
        now = time.monotonic()
        if self.ignores_signals or self._is_closed:
            return
        if self._first is not None:
            # The sender of SIGUSR1 allows time, and a launcher that passes it on may be slow.
            if number == signal.SIGTERM and now - self._first[1] > SAME_SIGNAL_S:
                # Safe at any moment: a checkpoint is complete or does not exist.
                os._exit(128 + number)
            return
        self._first = number, now
        name = signal.Signals(number).name
        self.cause = self.cause or {"signal": name, **self._place, "time": time.time()}
        if self._is_joined:
            self._request()
            return
        if self._prints:
            print_message(BEFORE_FIRST_STEP.format(name))
        os._exit(ExitCode.PREEMPTED)

    def _request(self) -> None:
        if self._vote is None:
            self.is_asked = True
        else:
            self._with_store(self._request_vote)

    def _request_vote(self) -> bool:
        assert self._store is not None
        assert self._vote is not None
        is_sigterm = self._first is not None and self._first[0] == signal.SIGTERM
        is_left = self.is_between_groups
        if is_sigterm and (
            self._has_lost_a_local_rank() or (not is_left and self._store.check([FIRST]))
        ):
            # Another rank has failed, and the launcher ends this one.
            self._exit(128 + signal.SIGTERM)
        if is_left:
            return False
        if len(self._nodes) > 1:
            self._store.set(self._own_node, json.dumps(self.cause))
        else:
            self._vote.request(self.cause, in_a_hurry=is_sigterm)
        return True

    def _leave(self, store: SealedStore, vote: StopVote) -> None:
        """If this node was asked to stop: if all were, they save and stop together; otherwise it
        exits alone."""
        if (request := store.peek(self._own_node)) is None:
            return
        cause = json.loads(request)
        self._node_asked_at = min(self._node_asked_at, time.monotonic())
        if store.check(self._nodes):
            self._nodes = []
            vote.request(
                cause, in_a_hurry=self._first is not None and self._first[0] == signal.SIGTERM
            )
        elif time.monotonic() > self._node_asked_at + ALL_NODES_S:
            if cause["rank"] == self._place["rank"]:  # the last one of this node that was asked
                print_message(LEAVES.format(**cause), stream=screen())
            # What the task has printed; it may block.
            wait([in_background(sys.stdout.flush)], timeout=FLUSH_S)
            self._exit(ExitCode.PREEMPTED)

    def _has_lost_a_local_rank(self) -> bool:
        """Whether a rank of this host has exited."""
        assert self._store is not None
        if len(self._local_pids) < len(self._local_ranks):
            self._local_pids = list(map(int, self._store.there(self._local_ranks).values()))
        return any(state_of(pid) in EXITED for pid in self._local_pids)

    def _tick(self) -> bool:
        if self._vote is None or self.is_between_groups:
            return False
        if len(self._nodes) > 1 and self._store is not None:
            self._leave(self._store, self._vote)
        is_busy = self._vote.tick()
        if self._vote.cause is not None:
            # The vote joins in one tick and answers in a later one: so the loop reads it before it
            # could miss its step.
            self.cause = self._vote.cause
            self.is_asked = True
        if self._vote.is_decided and self._vote.stop is None:
            is_own = self.cause.get("rank") == self._place["rank"]
            if is_own and not (self._first is None and self._has_warned):
                self._has_warned = True
                who = named_ranks(self._vote.missing_ranks())
                if self._first is None:
                    log.warning(NOTICE_IGNORED.format(**self.cause, who=who))
                else:
                    lines = (line.format(**self.cause, who=who) for line in EXITS_WITHOUT_SAVE)
                    print_message(*lines, stream=screen())
            self._give_up()
        return is_busy

    def _with_store(self, action: Callable[[], bool]) -> bool:
        vote = self._vote
        try:
            return action()
        except (dist.DistError, RuntimeError):  # the process with the store has exited
            if vote is not None:
                vote.abandon()
            if not self._may_leave:
                self._give_up()
            elif vote is self._vote:  # otherwise the next group has begun meanwhile
                self.is_asked = False
                self.is_between_groups = True
            return False

    def _give_up(self) -> None:
        self.is_asked = False
        if self._first is not None and not self.ignores_signals and not self._is_closed:
            self._exit(128 + self._first[0])

    def _exit(self, code: int) -> None:
        """Exit when the checkpoint that is being written is complete, if that is soon; at a second
        signal, at once."""
        deadline = time.monotonic() + MAX_WAIT_FOR_SAVE_S
        while self._pipe is not None and self.is_writing() and time.monotonic() < deadline:
            for number in self._pipe.wait(BUSY_POLL_S):
                self._receive(number)
        os._exit(code)


class Preempt(Action):
    """When any rank has received a signal or a notice: at the step that all agree on, save and end
    the run."""

    name = "preempt"
    interval = 0

    def __init__(
        self,
        preemption: Preemption,
        saver: Saver,
        comparison: CompareReplicas,
        non_finite: NonFinite,
    ) -> None:
        self._preemption = preemption
        self._saver = saver
        self._comparison = comparison
        self._non_finite = non_finite

    def start(self, context: RunContext) -> None:
        self._preemption.begin()
        self.run(context)

    def due(self, step: int) -> bool:
        return self._preemption.is_asked

    def run(self, context: RunContext) -> None:
        step = context.progress.step
        # At its last step the run ends as usual.
        if step >= context.progress.last_step or not self._preemption.stops_at(step):
            return
        context.progress.is_stopping = True
        if self._saver.saved_step != step:
            # also reports updates that were skipped since the last log line
            self._non_finite.read()
            self._comparison.run(context)
            self._saver.save_step({}, must_save=True)


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
        note_saved(preemption.environment)  # the other ranks know only after the barrier
    context.reporter.report(
        "preempted",
        step=step,
        signal=cause["signal"],
        about_rank=cause["rank"],
        about_host=cause["host"],
    )
    preemption.ignores_signals = True
    ddp.barrier()
    note_saved(preemption.environment)


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
        with contextlib.suppress(BlockingIOError):
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
        for number, handler in self._before.items():
            signal.signal(number, handler)


@contextmanager
def watching_for_notice(
    notice: str | None, ddp: RunManager, preemption: Preemption
) -> Iterator[None]:
    """While the block runs, one rank of each node polls for a notice (`--watch.notice`) in a
    thread: the steps do not wait for it, and its errors do not end them. A user's function is
    loaded here, so that a missing one is an error at once."""
    if notice is None or ddp.get_local_rank() != 0:
        yield
        return
    probe, every_s = make_probe(notice)
    ended = threading.Event()

    def ask() -> None:
        has_warned = False
        while not ended.is_set():
            try:
                text = probe()
            except Exception as error:
                if not has_warned:
                    log.warning(
                        f"watch.notice {notice} failed: {type(error).__name__}: {error}; retrying every {every_s:g} s "
                        "without another warning"
                    )
                text = None
                has_warned = True
            if text and not ended.is_set():
                preemption.notice = text
                return
            ended.wait(every_s)

    # A daemon thread that is not joined: the user's function may never return.
    threading.Thread(target=ask, name="drumline-notice", daemon=True).start()
    try:
        yield
    finally:
        ended.set()

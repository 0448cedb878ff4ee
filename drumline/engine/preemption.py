"""Told to leave by SIGTERM or SIGUSR1, a run finishes its step, saves, and ends so that the same command goes on later.

The signal may come to one rank or to all, at any moment. It is heard by a thread, the watcher (`signal_pipe.py`), which
talks to the watchers of the other ranks (`distributed/stop_vote.py`) until all know the step to stop at. The training
loop pays for all this with one look at `is_asked` after each step.

A notice (`reclaim.py`) is one word more that may come to a rank. It is no signal: one that follows it is the first.

Only the rank process of `drumline train` listens; in a loop of the user's own signals do what they always did.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from drumline.distributed.failure import FIRST
from drumline.distributed.stop_vote import StopVote
from drumline.engine.output import screen
from drumline.engine.saving import Progress
from drumline.engine.signal_pipe import SignalPipe
from drumline.errors import ExitCode
from drumline.launch.node.sealed_store import SealedStore
from drumline.log import log
from drumline.manager import DDPManager
from drumline.terminal import print_message
from drumline.text import number_ranges

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
POLL_S, BUSY_POLL_S = 0.5, 0.05
# A launcher that ends its ranks mostly kills them 30 seconds after its signal.
LINGER_S = 20.0
# A scheduler that signals a process and its parent, which passes it on, has said one thing, not two.
SAME_WORD_S = 2.0
TOO_EARLY = "told to leave by {} before the first step; the same command goes on from where the run stood"
NO_ANSWER = (
    "rank {rank} on {host}, told to leave by {signal}, ends without a save: {who} did not answer",
    "next: see what that rank does; the same command goes on from the newest checkpoint",
)
NOT_HEEDED = (
    "told to leave by {signal}, but {who} did not answer: the run goes on, and what it does is lost from its newest "
    "checkpoint on when the machine goes"
)


class Preemption:
    """Made for every run; one that does not `listen` never stops it."""

    def __init__(self) -> None:
        self.is_asked = False
        """Whether anybody was told to leave: all that the hot path looks at."""
        self.cause: dict[str, Any] = {}
        """Who was told, by which signal, when."""
        self.is_writing: Callable[[], bool] = lambda: False
        """Whether a checkpoint is being written by this rank."""
        self._is_speaker = False
        self._vote: StopVote | None = None
        self._store: SealedStore | None = None
        self._told: tuple[int, float] | None = None
        self._notice: str | None = None
        self._is_silence_told = False
        self._siblings: list[str] = []
        self._is_joined = self._is_leaving = self._is_closed = False
        self._place: dict[str, Any] = {}
        self._pipe: SignalPipe | None = None
        self._thread = threading.Thread(target=self._watch, name="drumline-preemption", daemon=True)

    def listen(self, *, is_speaker: bool) -> None:
        """From the main thread, as early as can be. `is_speaker`: whether this rank tells the user."""
        self._is_speaker = is_speaker
        self._pipe = SignalPipe(SIGNALS)
        self._thread.start()

    def join(self, ddp: DDPManager, progress: Progress) -> None:
        """The group is there: from now on all ranks stop together."""
        self._place = {"host": ddp.host, "rank": ddp.rank}
        if self._pipe is not None and ddp.store is not None:
            ddp.store.set(f"pid/{ddp.host}/{ddp.get_local_rank()}", str(os.getpid()))
            self._siblings = [f"pid/{ddp.host}/{rank}" for rank in range(ddp.local_world_size)]
            self._store = ddp.store.clone()
            self._vote = StopVote(
                self._store, rank=ddp.rank, world_size=ddp.world_size, step=lambda: progress.step
            )
        self._is_joined = True

    def tell(self, notice: str) -> None:
        """From any thread, once the group is there: this rank is to leave, for this reason. The watcher looks soon."""
        self._notice = notice

    def begin(self) -> None:
        """The loop is about to take its first step."""
        if self._vote is not None:
            self._vote.begin()

    def stops_at(self, step: int) -> bool:
        """Whether the run ends at the end of this step; waits while the ranks settle that."""
        return self.is_asked and (self._vote is None or self._vote.stops_at(step))

    def leave(self) -> None:
        """All is saved: that a launcher ends the last ranks by a signal, as the first are gone, is no second wish."""
        self._is_leaving = True

    def close(self) -> None:
        """From the main thread, before the group is left. May be called twice."""
        self._is_closed = True
        if self._pipe is None:
            return
        self._pipe.wake()
        self._thread.join()
        self._pipe.close(stay_deaf=self._is_leaving)
        self._pipe = None

    def _watch(self) -> None:
        assert self._pipe is not None
        timeout = POLL_S
        while not self._is_closed:
            for number in self._pipe.wait(timeout):
                self._hear(number)
            if self._notice is not None and not self.cause:
                self._heed(self._notice)
            timeout = BUSY_POLL_S if self._with_store(self._tick) else POLL_S

    def _hear(self, number: int) -> None:
        now = time.monotonic()
        if self._is_leaving or self._is_closed:
            return
        if self._told is not None:
            # Who sends SIGUSR1 gives time, and a launcher that passes it on may be slow to.
            if number == signal.SIGTERM and now - self._told[1] > SAME_WORD_S:
                os._exit(128 + number)  # in the middle of whatever: a checkpoint is whole or not there
            return
        self._told = number, now
        name = signal.Signals(number).name
        self.cause = self.cause or {"signal": name, **self._place, "time": time.time()}
        if not self._is_joined:
            self._end_early(name)
        elif self._vote is None:
            self.is_asked = True
        else:
            self._with_store(self._ask)

    def _heed(self, notice: str) -> None:
        self.cause = {"signal": notice, **self._place, "time": time.time()}
        if self._vote is None:
            self.is_asked = True
        else:
            self._with_store(self._ask)

    def _end_early(self, name: str) -> None:
        if self._is_speaker:
            print_message(TOO_EARLY.format(name))
        os._exit(ExitCode.PREEMPTED)

    def _ask(self) -> bool:
        assert self._store is not None
        assert self._vote is not None
        is_end = self._told is not None and self._told[0] == signal.SIGTERM
        if is_end and (self._store.check([FIRST]) or self._has_lost_a_sibling()):
            self._end(128 + signal.SIGTERM)  # a rank has failed, and the launcher ends the others
        self._vote.request(self.cause, in_a_hurry=is_end)
        return True

    def _has_lost_a_sibling(self) -> bool:
        """Whether a rank of this host has ended."""
        assert self._store is not None
        # One that has not come so far has nothing to say yet.
        known = [key for key in self._siblings if self._store.check([key])]
        return not all(_is_running(int(pid)) for pid in self._store.multi_get(known))

    def _tick(self) -> bool:
        if self._vote is None:
            return False
        is_busy = self._vote.tick()
        if self._vote.cause is not None:
            # The vote joins in one tick and answers in a later one: the loop looks before it could miss its step.
            self.cause, self.is_asked = self._vote.cause, True
        if self._vote.is_decided and self._vote.stop is None:
            is_mine = self.cause.get("rank") == self._place["rank"]
            if is_mine and not (self._told is None and self._is_silence_told):
                self._tell_of_silence(self._vote.silent())
            self._give_up()
        return is_busy

    def _tell_of_silence(self, ranks: Sequence[int]) -> None:
        who = f"rank{'s' if len(ranks) > 1 else ''} {number_ranges(ranks)}"
        self._is_silence_told = True
        if self._told is None:
            log.warning(NOT_HEEDED.format(**self.cause, who=who))
        else:
            print_message(*(line.format(**self.cause, who=who) for line in NO_ANSWER), stream=screen())

    def _with_store(self, action: Callable[[], bool]) -> bool:
        try:
            return action()
        except (dist.DistError, RuntimeError):  # whoever runs the store has ended
            if self._vote is not None:
                self._vote.abandon()
            self._give_up()
            return False

    def _give_up(self) -> None:
        self.is_asked = False
        if self._told is not None and not self._is_leaving and not self._is_closed:
            self._end(128 + self._told[0])

    def _end(self, code: int) -> None:
        """Once the checkpoint that is being written stands, if that is soon. Told again, at once."""
        deadline = time.monotonic() + LINGER_S
        while self._pipe is not None and self.is_writing() and time.monotonic() < deadline:
            for number in self._pipe.wait(BUSY_POLL_S):
                self._hear(number)
        os._exit(code)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's, then, in a container that shares the host's name
        return True
    return True

"""Whether all ranks differ from the first pass of a sharded model in the same way
(`--dist.find_unused_parameters`).

A rank that leaves out a block, or calls another one, asks in the store, before it enters a
collective of its own. Ranks that differ in the same way agree, and continue. A rank that has called
the block may be blocked in gathering it, so a thread answers for it. A pass like the first one asks
nothing.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from drumline.rank.sealed_store import SealedStore

POLL_S = 0.5
BUSY_POLL_S = 0.02


@dataclass(frozen=True)
class BlockCall:
    """What a rank calls at one position of a pass."""

    number: int
    """Of the pass."""
    position: int
    """In the order of the first pass."""
    block: str | None
    """None: no other block."""
    expected: str | None
    """What the first pass called at this position."""
    rank: int
    host: str

    @property
    def place(self) -> tuple[int, int]:
        return self.number, self.position

    def is_same(self, call: BlockCall) -> bool:
        return self.place == call.place and self.block == call.block


class BlockAgreement:
    """One rank's part. `reached`: the number of its pass, and the position in it. `store`: for this
    model only, empty at first."""

    def __init__(
        self,
        store: SealedStore,
        *,
        rank: int,
        host: str,
        world_size: int,
        timeout_s: float,
        reached: Callable[[], tuple[int, int]],
    ) -> None:
        self.rank = rank
        self.host = host
        self._world_size = world_size
        self._reached = reached
        self._store = store.clone()
        self._store.set_timeout(timedelta(seconds=timeout_s))
        self._thread_store = store.clone()
        self._question = 0
        """The number of the next question, the same on all ranks: they have agreed on those
        before."""
        self._num_asked = 0
        self._is_closed = threading.Event()
        threading.Thread(target=self._answer_questions, name="drumline-blocks", daemon=True).start()

    def different_call(self, call: BlockCall) -> BlockCall | None:
        """Wait until all ranks have come to this position; returns what another rank calls there,
        None if all call the same."""
        question = self._question
        # Before the position changes: the thread then leaves the answer to this rank's call.
        self._num_asked = question + 1
        first = _parse(self._store.compare_set(f"{question}/first", "", json.dumps(asdict(call))))
        answer = f"{question}/answer"
        if not first.is_same(call):
            self._store.set(answer, json.dumps(asdict(call)))
            return first
        if self._store.add(f"{question}/count", 1) == self._world_size:
            self._store.set(answer, json.dumps(None))
            # All ranks have read the answer before this one.
            for key in ("first", "count", "answer"):
                self._store.delete_key(f"{question - 1}/{key}")
        content = json.loads(self._store.get(answer))
        if content is not None:
            return BlockCall(**content)
        self._question = question + 1
        return None

    def close(self) -> None:
        self._is_closed.set()

    def _answer_questions(self) -> None:
        poll_s = POLL_S
        while not self._is_closed.wait(poll_s):
            try:
                poll_s = BUSY_POLL_S if self._answer(self._question) else POLL_S
            except (dist.DistError, RuntimeError):  # the process with the store has exited
                return

    def _answer(self, question: int) -> bool:
        """Answer the question if this rank has called the block in question. Returns whether it was
        asked."""
        content = self._thread_store.peek(f"{question}/first")
        if content is None:
            return False
        call = _parse(content)
        # In this order: the rank asks before its position changes.
        has_passed = self._reached() > call.place
        if has_passed and self._num_asked <= question:
            answer = BlockCall(
                call.number, call.position, call.expected, call.expected, self.rank, self.host
            )
            self._thread_store.set(f"{question}/answer", json.dumps(asdict(answer)))
        return True


def _parse(content: bytes) -> BlockCall:
    return BlockCall(**json.loads(content))

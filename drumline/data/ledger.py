"""The sample ledger: which positions of each epoch's order a rank has trained on, run-length
encoded.

The training loop adds every step; consecutive steps of one global batch each are one entry of five
numbers. An epoch is one entry, or two when its last batch is short. Before each save rank 0 writes
the entries of all ranks (`training/between_steps/saver.py`); `drumline verify` replays them. (The
samples of a stream are assigned round-robin, so there an entry states how many samples of a global
batch a rank had, not which.)
"""

from __future__ import annotations

from drumline.data.sharding import StepPlan
from drumline.runs.ledger_entries import LedgerEntry


class Ledger:
    """What this rank's steps have covered since the last `take`."""

    def __init__(self) -> None:
        self._entries: list[LedgerEntry] = []
        self._first = (0, 0)
        self._epoch = self._stride = self._count = 0
        # What the next step of the current entry would cover; initially no step matches.
        self._low = self._high = self._stop = -1

    def add(self, plan: StepPlan) -> None:
        """Record a step. It runs in every step: mostly it only increments a counter."""
        low, high = plan.local_range
        if (
            low == self._low
            and high == self._high
            and plan.stop == self._stop
            and plan.epoch == self._epoch
        ):
            stride = self._stride
            self._count += 1
            self._low = low + stride
            self._high = high + stride
            self._stop += stride
        else:
            self._end_entry()
            stride = plan.stop - plan.start
            self._epoch = plan.epoch
            self._stride = stride
            self._count = 1
            self._first = (low, high)
            self._low = low + stride
            self._high = high + stride
            self._stop = plan.stop + stride

    def take(self) -> list[LedgerEntry]:
        """The entries since the last call; the ledger is then empty."""
        self._end_entry()
        self._stop = -1  # no step continues that entry
        entries, self._entries = self._entries, []
        return entries

    def _end_entry(self) -> None:
        if self._count:
            self._entries.append(LedgerEntry(self._epoch, *self._first, self._stride, self._count))
            self._count = 0

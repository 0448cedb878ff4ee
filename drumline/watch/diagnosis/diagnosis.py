"""What is said of a run that does not move, or that broke: one sentence, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Cause(StrEnum):
    """Kinds of faults that are told apart."""

    KILLED = "killed"
    OUT_OF_MEMORY = "out_of_memory"
    EXCEPTION = "exception"
    STOPPED = "stopped"
    DEBUGGED = "debugged"
    DATASET = "dataset"
    """In the rank itself, or in one of its DataLoader workers."""
    USER_CODE = "user_code"
    GIL = "gil"
    """Python itself stands still: a call into C keeps its lock."""
    NOT_ENTERED = "not_entered"
    """A collective that others are in was never entered."""
    MISMATCH = "mismatch"
    """Ranks are in different collectives, or in one with different shapes."""
    LEFT_EARLY = "left_early"
    TEARDOWN = "teardown"
    UNREACHABLE = "unreachable"
    STORAGE = "storage"
    SLOW = "slow"
    """It works, and it takes its time."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """About one rank, or one host."""

    cause: Cause
    host: str
    rank: int | None
    """None: the whole host."""
    step: int | None
    what: str
    """The sentence without its first alarm, and without what to do."""
    next_step: str
    is_certain: bool
    """Whether it cannot go on by itself: then there is nothing to wait for."""
    since_s: float
    """How long ago it began, as far as can be told."""
    num_blocked: int = 0
    """Ranks that are blocked in a collective meanwhile."""

    def sentence(self, alarm: str) -> str:
        """`alarm`: `hang`, `stall` or `failure`."""
        return f"{alarm}: {self.what.rstrip('.')}. Next: {self.next_step}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Diagnosis:
        diagnosis = cls(**{**record, "cause": Cause(record["cause"])})
        texts, numbers = (
            (diagnosis.host, diagnosis.what, diagnosis.next_step),
            (diagnosis.rank, diagnosis.step),
        )
        if not all(isinstance(text, str) for text in texts) or type(diagnosis.since_s) not in (int, float):
            raise TypeError("the fields of a diagnosis have other types")
        if not all(number is None or type(number) is int for number in numbers):
            raise TypeError("the rank and the step of a diagnosis are whole numbers")
        return diagnosis

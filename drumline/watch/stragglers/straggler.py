"""One straggler, and how it reads."""

from __future__ import annotations

from dataclasses import dataclass

from drumline.watch.beats.phase import Phase

WORDS = {
    Phase.DATA: "data",
    Phase.FORWARD: "forward",
    Phase.OPTIMIZER: "optimizer",
    Phase.BETWEEN: "host code between steps",
}
NEXT = {
    Phase.DATA: "look at the storage that {host} reads from, at its DataLoader workers (data.workers), and at what "
    "else runs there",
    Phase.FORWARD: "look at what else runs on {host}, at its clock and its temperature; drumline doctor compares hosts",
    Phase.BETWEEN: "look at what this rank does between steps that the others do not: logs, trackers, callbacks",
}
NEXT[Phase.OPTIMIZER] = NEXT[Phase.FORWARD]
MOST_TIMES = 100


@dataclass(frozen=True)
class Loss:
    """What a rank takes longer for than its peers."""

    phases: tuple[Phase, ...]
    own_s: float
    """A step, in these phases."""
    peers_s: float

    @property
    def lost_s(self) -> float:
        return self.own_s - self.peers_s

    @property
    def factor(self) -> float:
        return self.own_s / max(self.peers_s, 1e-9)


@dataclass(frozen=True)
class Straggler:
    """A rank or a host that became one, or has ceased to be one."""

    host: str
    rank: int | None
    """None: all ranks of the host."""
    phase: str
    factor: float
    sentence: str
    is_over: bool = False


def slow_rank(loss: Loss, *, host: str, rank: int) -> Straggler:
    return _named(loss, host, rank, f"rank {rank} on {host} takes", "its")


def slow_host(loss: Loss, *, host: str) -> Straggler:
    return _named(loss, host, None, f"all ranks on {host} take", "their")


def over(*, host: str, rank: int | None, seconds: float) -> Straggler:
    who = f"all ranks on {host} keep" if rank is None else f"rank {rank} on {host} keeps"
    sentence = f"straggler: {who} up with the others again, after {seconds:.0f} s"
    return Straggler(host, rank, "", 1.0, sentence, is_over=True)


def _named(loss: Loss, host: str, rank: int | None, takes: str, whose: str) -> Straggler:
    phase = " and ".join(WORDS[one] for one in loss.phases)
    times = f"{loss.factor:.1f}" if loss.factor < MOST_TIMES else f"over {MOST_TIMES}"
    sentence = (
        f"straggler: {takes} {times} times as long as {whose} peers, in {phase} "
        f"({_ms(loss.own_s)} a step against {_ms(loss.peers_s)}); the run loses {loss.lost_s:.2g} s a step. "
        f"Next: {NEXT[loss.phases[0]].format(host=host)}"
    )
    return Straggler(host, rank, phase, loss.factor, sentence)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.{0 if seconds >= 0.01 else 1}f} ms"

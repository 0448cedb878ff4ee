"""What came of each fault of a storm: the sentence about it, the next step, and how much of the
time trained."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.multinode.faults.reading import Done, Said, again, said_in

CAUSES = {"kill": "killed", "stop": "stopped", "exit": "left_early"}
UNREACHABLE = ("cut_5", "cut_10", "cut_16", "power_off")
PRINTED = {
    "agent": "the launcher's agent on {host} was killed by SIGKILL",
    "power_off": "the connection to {host} was lost",
}
"""What the launch prints itself."""


@dataclass
class Strike:
    """One fault: what, where and when; and what came of it."""

    kind: str
    host: str
    time: float
    screen_from: int
    """How many bytes the launch had printed."""
    rank: int | None = None
    is_right: bool = False
    right_s: float | None = None
    """After how many seconds the right sentence came."""
    new_step_s: float | None = None
    steps_lost: int | None = None
    effective: float | None = None
    """Which part of the time until the next fault was spent on steps that were kept."""
    sentences: list[str] = field(default_factory=list)


class Timeline:
    """When the launch had printed how much."""

    def __init__(self) -> None:
        self._sizes: list[tuple[float, int]] = []

    def note(self, log: Path) -> None:
        size = log.stat().st_size
        if not self._sizes or size != self._sizes[-1][1]:
            self._sizes.append((time.time(), size))

    def time_of(self, position: int) -> float | None:
        """When what is at this position had been printed."""
        return next((noted_at for noted_at, size in self._sizes if size > position), None)


def judge(
    strikes: Sequence[Strike], folder: Path, steps: list[Done], screen: bytes, timeline: Timeline
) -> None:
    """Fill in what came of each, from the events, the steps and the screen until the next one."""
    sentences = said_in(folder)
    for number, strike in enumerate(strikes):
        following = strikes[number + 1] if number + 1 < len(strikes) else None
        until = following.time if following else float("inf")
        screen_until = following.screen_from if following else len(screen)
        about = [
            sentence
            for sentence in sentences
            if strike.time <= sentence.time < until and _counts(sentence, strike)
        ]
        strike.sentences = [sentence.message for sentence in about]
        _judge_step(strike, steps, until)
        strike.effective = _effective_until(until, strike, steps)
        if strike.kind == "sidecar":
            strike.is_right = not about
            continue
        reports = (
            []
            if strike.kind == "agent"
            else [(sentence.time, _is_right(sentence, strike)) for sentence in about]
        )
        printed_at = _printed_at(strike, screen[:screen_until], timeline)
        if printed_at is not None:
            reports.append((printed_at, True))
        reports.sort()
        right_times = [reported_at for reported_at, is_right in reports if is_right]
        strike.is_right = bool(reports) and reports[0][1]
        strike.right_s = right_times[0] - strike.time if right_times else None


def _printed_at(strike: Strike, screen: bytes, timeline: Timeline) -> float | None:
    """When the launch itself printed what happened."""
    if strike.kind not in PRINTED:
        return None
    position = screen.find(
        PRINTED[strike.kind].format(host=strike.host).encode(), strike.screen_from
    )
    return timeline.time_of(position) if position >= 0 else None


def _counts(said: Said, strike: Strike) -> bool:
    """A stall is a notice; it counts where it is the sentence that is waited for."""
    return said.word != "stall" or (strike.kind in UNREACHABLE and said.cause == "unreachable")


def _is_right(said: Said, strike: Strike) -> bool:
    if strike.kind in UNREACHABLE:
        return said.cause == "unreachable" and said.host == strike.host
    return (said.cause, said.host, said.rank) == (CAUSES[strike.kind], strike.host, strike.rank)


def _judge_step(strike: Strike, steps: list[Done], until: float) -> None:
    """The next step is the first of the restarted job. Where nothing was restarted, it is the first
    one after the longest pause."""
    restarted = again(steps, strike.time)
    if (
        restarted.first_new_step is not None
        and restarted.first_new_step < until
        and strike.kind != "sidecar"
    ):
        strike.new_step_s = restarted.first_new_step - strike.time
        strike.steps_lost = restarted.steps_lost
        return
    before = [step for step in steps if step.time <= strike.time]
    times = [step.time for step in before[-1:]] + [
        step.time for step in steps if strike.time < step.time < until
    ]
    pauses = list(itertools.pairwise(times))
    if strike.kind == "sidecar":  # it disturbs nothing
        pauses = pauses[:1]
    if pauses:
        paused_at, resumed = max(pauses, key=lambda pause: pause[1] - pause[0])
        if resumed - paused_at >= 1 or strike.kind == "sidecar":
            strike.new_step_s = resumed - strike.time
            strike.steps_lost = 0


def effective_time(steps: Sequence[Done]) -> float | None:
    """Steps kept, at the pace of an undisturbed step, over the time from the first step to the
    last."""
    if len(steps) < 2:
        return None
    return (steps[-1].step - steps[0].step) * _pace_s(steps) / (steps[-1].time - steps[0].time)


def _effective_until(until: float, strike: Strike, steps: Sequence[Done]) -> float | None:
    """The same, from a fault to the next one: what the fault cost is part of that time."""
    before = [step for step in steps if step.time < strike.time]
    after = [step for step in steps if strike.time <= step.time < until]
    if not before or not after:
        return None
    seconds = min(until, steps[-1].time) - strike.time
    return (after[-1].step - before[-1].step) * _pace_s(steps) / seconds


def _pace_s(steps: Sequence[Done]) -> float:
    return statistics.median(
        after.time - before.time
        for before, after in itertools.pairwise(steps)
        if after.start == before.start
    )


def table(strikes: Sequence[Strike], steps: Sequence[Done]) -> str:
    """In Markdown, one row for each kind."""
    lines = [
        "| kind | n | diagnosed right | right sentence after: median, longest (s) "
        "| next step after: median, longest (s) | steps lost: median, most | effective time |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    kinds = sorted({strike.kind for strike in strikes})
    lines += [_row(kind, [strike for strike in strikes if strike.kind == kind]) for kind in kinds]
    whole = effective_time(steps)
    lines.append(_row("**all**", strikes, effective=whole))
    return "\n".join(lines)


def _row(name: str, strikes: Sequence[Strike], *, effective: float | None = None) -> str:
    if effective is None:
        shares = [strike.effective for strike in strikes if strike.effective is not None]
        effective = statistics.mean(shares) if shares else None
    cells = [
        name,
        str(len(strikes)),
        str(sum(strike.is_right for strike in strikes)),
        _median_and_most([strike.right_s for strike in strikes], "{:.1f}"),
        _median_and_most([strike.new_step_s for strike in strikes], "{:.1f}"),
        _median_and_most([strike.steps_lost for strike in strikes], "{:.0f}"),
        "-" if effective is None else f"{effective:.0%}",
    ]
    return f"| {' | '.join(cells)} |"


def _median_and_most(values: Sequence[float | None], form: str) -> str:
    numbers = [value for value in values if value is not None]
    if not numbers:
        return "-"
    return f"{form.format(statistics.median(numbers))}, {form.format(max(numbers))}"

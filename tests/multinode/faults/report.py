"""The full report of a case: what was expected, what was reported and when, and what is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from tests.multinode.faults.catalogue import FAULTS, HOSTS
from tests.multinode.faults.matrix import Result


def is_fine(result: Result) -> bool:
    """Told rightly, nothing lost but what may be, the right bits, and nothing left behind."""
    return not whats_wrong(result)


def whats_wrong(result: Result) -> list[str]:
    wrong = {
        "nothing was said": not result.said,
        "what was said is not what was expected": bool(result.said) and not result.is_right,
        "the bits are not those of a calm run": not result.has_right_bits,
        "no step was done after the fault": result.new_step_s is None
        and FAULTS[result.fault].restarts,
        "something was left behind": bool(result.left_behind),
    }
    return [*result.problems, *(what for what, is_so in wrong.items() if is_so)]


def report(result: Result) -> str:
    """For an assertion: pytest shortens what is no text."""
    return "\n".join(_lines(result))


def _lines(result: Result) -> Iterator[str]:
    yield f"{result.fault} {result.seed} at step {result.step} of rank {result.rank} on {result.host}"
    yield f"wrong: {'; '.join(whats_wrong(result)) or 'nothing'}"
    yield f"expected: {_expected(result)}"
    for sentence in result.said:
        place = f"host {sentence['host']}, rank {sentence['rank']}"
        yield f"said: {_after(result, sentence)}: {sentence['cause']}, {place}: {sentence['message']}"
    yield f"all of it: {json.dumps(asdict(result), indent=1)}"


def _expected(result: Result) -> str:
    fault = FAULTS[result.fault]
    who = {
        "rank": f"rank {result.rank} on {result.host}",
        "host": f"host {result.host}",
        "either": f"one of the hosts {', '.join(HOSTS)}",
    }[fault.names]
    return f"{' or '.join(fault.causes)}, {who}{f', with the words: {fault.says}' if fault.says else ''}"


def _after(result: Result, one: dict[str, object]) -> str:
    """In seconds from the fault; the first sentence is where that is known from."""
    since_first = float(str(one["time"])) - float(str(result.said[0]["time"]))
    return f"{(result.diagnosis_s or 0.0) + since_first:.1f} s after it"

"""The table of the soak: for each fault how often it was diagnosed right and how soon, compared
with torchrun."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from tests.multinode.faults.catalogue import FAULTS
from tests.multinode.faults.matrix import Result
from tests.multinode.faults.plain import PlainResult

HEADINGS = (
    "fault",
    "n",
    "right",
    "diagnosis (s): median, p95",
    "new step (s): median, p95",
    "steps lost",
    "bits right",
    "torchrun: said (s)",
    "named only the right rank",
    "new step (s)",
)


def make_table(results: Sequence[Result], plain: Sequence[PlainResult], *, cap_s: float) -> str:
    """In Markdown; the last row is over all."""
    rows = [HEADINGS, tuple("---" for _ in HEADINGS)]
    for name, fault in FAULTS.items():
        if mine := [result for result in results if result.fault == name]:
            rows.append(
                _row(
                    fault.title,
                    mine,
                    [outcome for outcome in plain if outcome.fault == name],
                    cap_s,
                )
            )
    rows.append(_row("all", results, plain, cap_s))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(
    title: str, results: Sequence[Result], plain: Sequence[PlainResult], cap_s: float
) -> tuple[str, ...]:
    return (
        title,
        str(len(results)),
        str(sum(result.is_right for result in results)),
        _spread([result.diagnosis_s for result in results]),
        _spread([result.new_step_s for result in results]),
        str(max((result.steps_lost or 0 for result in results), default=0)),
        str(sum(result.has_right_bits for result in results)),
        _median([outcome.said_s for outcome in plain], f"nothing in {cap_s:g}"),
        f"{sum(outcome.names_only_the_right_one for outcome in plain)} of {len(plain)}"
        if plain
        else "",
        _median([outcome.new_step_s for outcome in plain], "none"),
    )


def _spread(values: Sequence[float | None]) -> str:
    """Of those that there are; how many there are not is said too."""
    numbers = sorted(value for value in values if value is not None)
    if not numbers:
        return "none"
    p95 = numbers[math.ceil(0.95 * len(numbers)) - 1]
    missing = f" ({len(values) - len(numbers)} without)" if len(numbers) < len(values) else ""
    return f"{statistics.median(numbers):.1f}, {p95:.1f}{missing}"


def _median(values: Sequence[float | None], nothing: str) -> str:
    known = [value for value in values if value is not None]
    if not values:
        return ""
    few = (
        f" ({len(values) - len(known)} of {len(values)}: {nothing})"
        if known and len(known) < len(values)
        else ""
    )
    return f"{statistics.median(known):.1f}{few}" if known else nothing

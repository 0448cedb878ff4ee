"""How many nodes a job has: `3`, `2:3` (goes on with two of three), or `2:` where their number is known otherwise."""

from __future__ import annotations

import re
from dataclasses import dataclass

from drumline.errors import UsageError
from drumline.untrusted import whole_number

FORM = "a number of nodes (3), or the least and the greatest (2:3)"
COUNTS = re.compile(r"(?:(?P<least>[0-9]+):)?(?P<most>[0-9]*)")


@dataclass(frozen=True)
class NodeCounts:
    """The least number of nodes, None for all of them; and the greatest, None when the user did not say."""

    least: int | None
    most: int | None


def read_counts(text: str) -> NodeCounts | None:
    """What the user wrote; None when it is no such thing."""
    found = COUNTS.fullmatch(text.strip())
    if found is None or text.strip() == "":
        return None
    least = whole_number(found["least"]) if found["least"] else None
    most = whole_number(found["most"]) if found["most"] else None
    if any(found[name] and number is None for name, number in (("least", least), ("most", most))):
        return None
    if 0 in (least, most) or (least is not None and most is not None and least > most):
        return None
    return NodeCounts(least, most)


def wrong_counts(text: str) -> str | None:
    """What is wrong with `--nnodes`, if anything."""
    return None if read_counts(text) else f"--nnodes: {text!r} is not understood; give {FORM}"


def least_nodes(text: str | None, num_nodes: int, *, known_from: str) -> int | None:
    """`--nnodes` for a job whose number of nodes is known: how many of them will do, None for all."""
    counts = None if text is None else read_counts(text)
    if counts is None:
        return None
    if (counts.most or num_nodes) != num_nodes or (counts.least or 1) > num_nodes:
        raise UsageError(
            f"--nnodes is {text}, but there {'is' if num_nodes == 1 else 'are'} {num_nodes} in {known_from}",
            next_step=f"give `--nnodes MIN:`, with a MIN from 1 to {num_nodes}",
        )
    return counts.least

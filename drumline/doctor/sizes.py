"""Bytes and lists of names, as people read them."""

from __future__ import annotations

from collections.abc import Sequence

UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
MIB = 1 << 20
GIB = 1 << 30
MOST_NAMES = 4


def bytes_text(count: int) -> str:
    """`64 MiB`, `1.5 GiB`."""
    value, unit = float(count), UNITS[0]
    for larger in UNITS[1:]:
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


def names_text(names: Sequence[str]) -> str:
    """`a`, `a, b and c`, `a, b, c, d and 252 others`."""
    if len(names) > MOST_NAMES + 1:
        return f"{', '.join(names[:MOST_NAMES])} and {len(names) - MOST_NAMES} others"
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"

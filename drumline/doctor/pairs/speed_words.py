"""Times and speeds as people say them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from drumline.doctor.sizes import bytes_text

RATES = ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"))


def bit_rate(bytes_per_s: float) -> str:
    """`9.4 Gbit/s`: lines are sold by bits."""
    bits = bytes_per_s * 8
    for size, unit in RATES:
        if bits >= size:
            return f"{_short(bits / size)} {unit}"
    return f"{bits:.0f} bit/s"


def short_rate(bytes_per_s: float) -> str:
    """`9.4G`, for cells of a table that says what they are."""
    return re.sub(r" ([Gkm]?)bit/s", r"\1", bit_rate(bytes_per_s), flags=re.IGNORECASE)


def latency(seconds: float) -> str:
    """`0.12 ms`."""
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-4 else f"{_short(seconds * 1e3)} ms"


def collectives_text(numbers: Mapping[str, float]) -> str:
    """What the collectives have measured; empty when they came to nothing."""
    if not numbers:
        return ""
    size, rate = bytes_text(int(numbers["all_reduce_bytes"])), numbers["all_reduce_gb_per_s"]
    smallest = f"the smallest in {numbers['all_reduce_latency_us']:.0f} us"
    # One rank alone moves nothing.
    return f"all_reduce of {size} at {rate:.3g} GB/s, {smallest}" if rate else f"all_reduce: {smallest}"


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 1 else f"{value:.1f}" if value < 10 else f"{value:.0f}"

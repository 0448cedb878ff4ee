"""What the ranks of the collectives said, brought together: each finding once, who was silent, and the numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from drumline.doctor.finding import Finding
from drumline.text import memory_size

# Of one rank, as `processes.py` gives it, with the host it ran on.
Said = Mapping[str, Any]


def collective_findings(said: Sequence[Said], names: Mapping[str, str]) -> list[Finding]:
    """What the ranks found, each thing once; a rank that says nothing, and of which nobody speaks, is a finding too.

    `names`: what we call the hosts, by what they call themselves."""
    told = [Finding(**found) for result in _results(said) for found in result["findings"]]
    text = " ".join(found.what for found in told)
    silent = [
        _silent(one) for one in said if one.get("result") is None and f"rank {one['rank']} " not in text
    ]
    named = [replace(found, where=names.get(found.where, found.where)) for found in told]
    return list(dict.fromkeys([*named, *silent]))


def numbers_of(said: Sequence[Said]) -> Mapping[str, float]:
    """What the first rank that came so far has measured; empty when none did."""
    return next((result["numbers"] for result in _results(said) if result.get("numbers")), {})


def collectives_line(said: Sequence[Said]) -> str:
    """`collectives: 4 ranks, all values right; all_reduce of 4 MiB at 1.2 GB/s, ...`."""
    results = _results(said)
    is_right = len(results) == len(said) and not any(result["findings"] for result in results)
    measured = collectives_text(numbers_of(said))
    how = "all values right" if is_right else "not all well"
    return f"collectives: {len(said)} ranks, {how}" + (f"; {measured}" if measured else "")


def _results(said: Sequence[Said]) -> list[dict[str, Any]]:
    return [one["result"] for one in said if one.get("result") is not None]


def _silent(one: Said) -> Finding:
    return Finding(
        level="problem",
        check="collectives",
        where=one["host"],
        what=f"rank {one['rank']} of the doctor's own process group gave no result: {one.get('error')}",
        fix=f"on {one['host']}: python -c 'import torch.distributed', and look at what it says",
    )


def collectives_text(numbers: Mapping[str, float]) -> str:
    """What the collectives have measured; empty when they came to nothing."""
    if not numbers:
        return ""
    size, rate = memory_size(int(numbers["all_reduce_bytes"])), numbers["all_reduce_gb_per_s"]
    smallest = f"the smallest in {numbers['all_reduce_latency_us']:.0f} us"
    # One rank alone moves nothing.
    return f"all_reduce of {size} at {rate:.3g} GB/s, {smallest}" if rate else f"all_reduce: {smallest}"

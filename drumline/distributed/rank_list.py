"""Ranks by number, as they are written in sentences. Without torch: the sidecar of the watch writes such sentences."""

from __future__ import annotations

from collections.abc import Sequence


def ranks_text(ranks: Sequence[int]) -> str:
    """`0, 1, 4-7`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)

"""Whether Holistic Trace Analysis finds the same overlap and idle time in the traces of a profile
on GPUs.

    pip install --target build/hta HolisticTraceAnalysis
    PYTHONPATH=build/hta python -m benchmarks.hta_agreement RUN        (or: make bench-profile RUN=runs/digits)

Overlap: the part of the communication kernels' time in which the device computes. Idle: the part of
the time without a kernel. docs/profile.md has where the definitions differ. The goal is a
difference of at most 3 percentage points on every rank; a larger one fails.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from drumline.base.errors import UsageError
from drumline.runs.profile_files import PROFILE_FOLDER, trace_path
from drumline.runs.profile_result import RankSteps, read_profile

GOAL = 3.0


def ours(rank: RankSteps) -> tuple[float, float]:
    """Overlap and idle time of a rank, in percent; an open collective is a kernel that runs,
    waiting or not."""
    hidden = rank.hidden_communication_s
    bare = rank.parts_s["exposed_communication"] + rank.parts_s["waiting_for_rank"]
    step = sum(rank.parts_s.values())
    idle = step - rank.parts_s["compute"] - bare
    return 100 * hidden / max(hidden + bare, 1e-12), 100 * idle / step


def theirs(traces: dict[int, Path]) -> dict[int, tuple[float, float]]:
    """The same by HTA, whose window is from the first kernel to the last one."""
    # otherwise every kernel is up to a microsecond shorter
    os.environ["HTA_DISABLE_NS_ROUNDING"] = "1"
    from hta.trace_analysis import TraceAnalysis

    analysis = TraceAnalysis(
        trace_files={rank: str(path) for rank, path in traces.items()}, trace_dir=""
    )
    overlaps = analysis.get_comm_comp_overlap(visualize=False)
    idle = analysis.get_temporal_breakdown(visualize=False)
    overlap_of = dict(zip(overlaps["rank"], overlaps["comp_comm_overlap_pctg"], strict=True))
    idle_of = dict(zip(idle["rank"], idle["idle_time_pctg"], strict=True))
    return {rank: (float(overlap_of[rank]), float(idle_of[rank])) for rank in traces}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="a run folder with a profile on GPUs")
    run = parser.parse_args().run
    result = read_profile(run)
    if result.device == "cpu":
        raise UsageError(f"{run} is a profile on the CPU: HTA reads kernels of GPUs only")
    hta_parts = theirs(
        {rank.rank: trace_path(run / PROFILE_FOLDER, rank.rank) for rank in result.ranks}
    )
    worst = 0.0
    print(f"{'rank':>4}  {'overlap':>8} {'HTA':>8} {'':>7}  {'idle':>8} {'HTA':>8}")
    for rank_steps in result.ranks:
        pairs = list(zip(ours(rank_steps), hta_parts[rank_steps.rank], strict=True))
        worst = max(
            [worst, *(abs(ours_percent - hta_percent) for ours_percent, hta_percent in pairs)]
        )
        cells = [
            f"{ours_percent:7.2f}% {hta_percent:7.2f}% {ours_percent - hta_percent:+7.2f}"
            for ours_percent, hta_percent in pairs
        ]
        print(f"{rank_steps.rank:>4}  {'  '.join(cells)}")
    print(f"largest difference: {worst:.2f} percentage points (goal: at most {GOAL:g})")
    return int(worst > GOAL)


if __name__ == "__main__":
    sys.exit(main())

"""What planning, checks and reports cost the doctor, for up to 256 hosts that exist in memory
alone.

    make bench-doctor        (or: python -m benchmarks.doctor_scale --hosts 64,256)

Hosts answer at once, so what is measured is the coordinator's own work: 65,280 links for 256 hosts.
CPU seconds of this process, best of the rounds. The goal is below 5 s for 256 hosts.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import time
from collections.abc import Callable

from drumline.tools.doctor.doctor_report import as_json, report
from drumline.tools.doctor.pairs.pair_checks import pair_findings
from tests.unit.tools.doctor.simulated import Cluster, examine

GOAL_S = 5.0


def cluster_of(count: int) -> Cluster:
    """A few faults of each kind, and one that hits many links."""
    shut = count - 1
    return Cluster(
        count,
        down=[5],
        closed={(source, shut) for source in range(count)} | {(1, 2), (2, 1)},
        unnamed={(source, 3) for source in range(count)},
        holes={(4, 1)},
        slow=[6],
        late=[0],
    )


def timed(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def cost(count: int) -> dict[str, float]:
    """CPU seconds of each part."""
    results = []
    begin = time.process_time()
    survey = examine(cluster_of(count))
    results.append(("examine", time.process_time() - begin))
    begin = time.process_time()
    findings = pair_findings(survey)
    results.append(("check", time.process_time() - begin))
    with contextlib.redirect_stdout(io.StringIO()):
        results.append(("screen", timed(lambda: report(findings, survey=survey))))
    results.append(("json", timed(lambda: as_json(findings, survey=survey))))
    return dict(results)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", default="8,64,256")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    for count in map(int, arguments.hosts.split(",")):
        best = min(
            (cost(count) for _ in range(arguments.rounds)), key=lambda parts: sum(parts.values())
        )
        shown = "  ".join(f"{name} {seconds:.2f}" for name, seconds in best.items())
        goal = f"  (goal {GOAL_S:g})" if count == 256 else ""
        print(
            f"{count:>4} hosts  {count * (count - 1):>6,} links  {sum(best.values()):.2f} CPU s: {shown}{goal}"
        )


if __name__ == "__main__":
    main()

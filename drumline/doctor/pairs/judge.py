"""From what was measured to sentences: one per problem, with the host or the edge, the cause, and the fix to type.

A cause shows on many edges. What holds for all ways into a host is said once, of that host; what holds for all hosts is
said once; only what is left is said edge by edge (gathered.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from drumline.doctor.finding import Finding, Level
from drumline.doctor.pairs.judge_interfaces import interface_findings
from drumline.doctor.pairs.judge_names import double_findings, name_findings
from drumline.doctor.pairs.judge_ports import data_findings, hole_findings, meeting_findings
from drumline.doctor.pairs.judge_speed import speed_findings
from drumline.doctor.pairs.survey import Survey

# Log lines of hosts that are apart by this much are read in the wrong order.
CLOCK_WARNING_S = 1.0
# Signed requests to storage are refused after minutes, and files of a shared volume look as if from the future.
CLOCK_PROBLEM_S = 60.0


def judge(survey: Survey) -> list[Finding]:
    """Everything that the network and the clocks have shown."""
    return [
        *absent_findings(survey),
        *double_findings(survey),
        *name_findings(survey),
        *meeting_findings(survey),
        *data_findings(survey),
        *interface_findings(survey),
        *hole_findings(survey),
        *speed_findings(survey),
        *clock_findings(survey),
    ]


def absent_findings(survey: Survey) -> Iterator[Finding]:
    for host in survey.hosts:
        if host.absent is not None:
            yield Finding(
                level="problem", check="host", where=host.name, what=host.absent, fix=host.absent_fix
            )
        for text in host.troubles:
            what = f"it could not do what was asked: {text}"
            fix = "mend that on the host; what depends on it was not examined"
            yield Finding(level="problem", check="host", where=host.name, what=what, fix=fix)


def clock_findings(survey: Survey) -> Iterator[Finding]:
    known = {number: host.clock_s for number, host in enumerate(survey.hosts) if host.clock_s is not None}
    if len(known) < 2:
        return
    first = next(iter(known))
    # Of three and more, most are right; of two, nobody knows, and the first one counts.
    usual = known[first] if len(known) == 2 else statistics.median_low(known.values())
    compared = f"{survey.hosts[first].name}'s" if len(known) == 2 else "the other hosts'"
    for number, clock in known.items():
        apart = clock - usual
        if abs(apart) >= CLOCK_WARNING_S:
            name = survey.hosts[number].name
            level: Level = "problem" if abs(apart) >= CLOCK_PROBLEM_S else "warning"
            what = f"its clock is {abs(apart):,.1f} s {'ahead of' if apart > 0 else 'behind'} {compared}"
            fix = f"sudo chronyc makestep on {name} (or start chrony or ntpd there)"
            yield Finding(level=level, check="clock", where=name, what=what, fix=fix)

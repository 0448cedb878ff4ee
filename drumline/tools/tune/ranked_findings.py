"""Findings in the order in which to look at them: causes before what follows from them, and the
earliest first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Set
from dataclasses import dataclass, replace
from typing import Literal, Self, cast, get_args

from drumline.base.text import plural
from drumline.tools.doctor.finding import LEVELS, Finding, Level
from drumline.tools.tune.collective_waits import WaitExplanation
from drumline.tools.tune.fault_context import LinePlace
from drumline.tools.tune.job_faults import JobFaults, LoggedFault, LogMoment, PlainFault

Precedence = Literal[
    "cause",
    "explanation",
    "failure",
    "warned",
    "symptom",
    "disconnect",
    "condition",
    "outcome",
    "unexplained",
    "echo",
]
"""An explanation is a condition that explains a fault of these logs, or follows from several
lines. NCCL has warned of something that no message explains. An outcome is how a log or a job
ends."""
PRECEDENCES: tuple[Precedence, ...] = get_args(Precedence)
START = LogMoment((0, 0, 0.0), 0)
LAST = LogMoment((99, 0, 0.0), 0)
CONSEQUENCES: tuple[Precedence, ...] = ("symptom", "disconnect", "outcome", "echo")
NO_INFINIBAND = ("no InfiniBand", "no InfiniBand library")
UNEXPLAINED = "unknown"  # the check of a line that is shown as it is
NO_P2P = (
    "NCCL_P2P_DISABLE=1 shows whether it is that, and trains without it; then turn off ACS and the "
    "IOMMU (BIOS, iommu=pt), update the driver, or leave P2P off for GeForce cards; nvidia-smi topo -p2p r"
)
NO_RDMA = (
    "NCCL_NET_GDR_LEVEL=LOC, then NCCL_IB_DISABLE=1 show which part it is; ib_write_bw between the "
    "hosts; the same MTU and GID index everywhere; ACS off"
)
READ_FIRST = (
    "the job failed, and no other line shows why: read the lines around this one, and look for its "
    "text in the issues of that project; a newer NCCL or driver may have it fixed"
)
EXCEPTION_FIRST = (
    "correct this first: what other ranks report after it, such as time-outs and closed "
    "connections, follows from it"
)
BROKEN_P2P = (
    "P2P (peer-to-peer) between GPUs does not work on this host: PCIe ACS or an IOMMU, a virtual "
    "machine, or GeForce cards"
)
BROKEN_RDMA = (
    "no data passes between the network cards, or between cards and GPUs (GPUDirect RDMA, ACS, MTU, "
    "GID index)"
)
BROKEN_TCP = "no data passes between the hosts on NCCL's data ports: a firewall, or another MTU"
NO_DATA = "let the hosts reach each other on all TCP ports, the same MTU everywhere: drumline doctor --hosts A,B"


@dataclass(frozen=True, kw_only=True)
class RankedFinding:
    finding: Finding
    precedence: Precedence
    moment: LogMoment = START

    @classmethod
    def of(
        cls,
        precedence: Precedence,
        level: Level,
        check: str,
        where: str,
        what: str,
        fix: str = "",
        moment: LogMoment = START,
    ) -> Self:
        finding = Finding(level, check, where, what, fix)
        return cls(finding=finding, precedence=precedence, moment=moment)

    @property
    def order(self) -> tuple[int, int, LogMoment]:
        """How a job ended says less than a warning about what it ran on."""
        is_end = self.precedence in ("outcome", "echo") and self.finding.level == "problem"
        level: Level = "warning" if is_end else self.finding.level
        return (LEVELS.index(level), PRECEDENCES.index(self.precedence), self.moment)


def in_order(ranked: Iterable[RankedFinding]) -> list[Finding]:
    """An echo counts only where nothing else is a problem. It shows that the job failed: an error
    that is not explained is then the likely cause, and comes first. So does what NCCL warned of
    where all problems follow from something else."""
    candidates = [*ranked]
    problems = [item for item in candidates if item.finding.level == "problem"]
    echoes = [item for item in problems if item.precedence == "echo"]
    if len(echoes) < len(problems):
        candidates = [item for item in candidates if item.precedence != "echo"]
    elif echoes:
        candidates = [_as_likely_cause(item) for item in candidates]
    if problems and all(item.precedence in CONSEQUENCES for item in problems):
        # A time-out names ranks and likely causes, which says more than an error of any program.
        is_explained = any(item.precedence == "symptom" for item in problems)
        likely = ("warned",) if is_explained else ("warned", "unexplained")
        candidates = [
            _as_likely_cause(item) if item.precedence in likely else item for item in candidates
        ]
    return [item.finding for item in sorted(candidates, key=lambda item: item.order)]


def _as_likely_cause(item: RankedFinding) -> RankedFinding:
    if item.finding.check != UNEXPLAINED:
        return item
    finding = replace(item.finding, level="problem", fix=READ_FIRST)
    return replace(item, finding=finding, precedence="warned")


def fault_findings(
    faults: JobFaults,
    *,
    name_of: Callable[[str], str],
    transports: Collection[str],
    expected_rdma: str,
) -> Iterator[RankedFinding]:
    """`name_of`: the name of an origin; `transports`: those between hosts; `expected_rdma`: what
    shows that InfiniBand is to be used."""
    kinds = faults.kinds()
    failures = faults.failures()
    counts = Counter(fault.message.kind for fault in faults.messages.values())
    for fault in faults.messages.values():
        only_over = fault.message.only_over
        if not only_over or only_over in transports:
            where = name_of(fault.origin)
            ranked = _message_finding(fault, where, faults.work, kinds, failures)
            is_repeated = counts[fault.message.kind] > 1
            ranked = _refined(ranked, faults, fault.places, is_repeated=is_repeated)
            is_missed = expected_rdma and fault.message.kind in NO_INFINIBAND
            yield _as_missed(ranked, expected_rdma) if is_missed else ranked
    for plain in faults.plain.values():
        ranked = _plain_finding(plain, name_of(plain.origin))
        yield _refined(ranked, faults, plain.places, is_repeated=False)
    if faults.num_unkept:
        what = f"{plural(faults.num_unkept, 'more line')} that are not explained"
        yield RankedFinding.of(
            "unexplained", "warning", UNEXPLAINED, "these logs", what, moment=LAST
        )


def _refined(
    ranked: RankedFinding, faults: JobFaults, places: Collection[LinePlace], *, is_repeated: bool
) -> RankedFinding:
    finding = faults.context.refined(
        ranked.finding, places, work=faults.work, is_repeated=is_repeated
    )
    return replace(ranked, finding=finding)


def _as_missed(ranked: RankedFinding, expected_rdma: str) -> RankedFinding:
    what = f"{ranked.finding.what}; this job is meant to use InfiniBand ({expected_rdma})"
    return replace(ranked, finding=replace(ranked.finding, level="problem", what=what))


def _message_finding(
    fault: LoggedFault, where: str, work: str, kinds: Set[str], failures: Set[str]
) -> RankedFinding:
    """`kinds`: of all faults; `failures`: of those that do not only follow from others."""
    message = fault.message
    what = fault.what
    if message.shows_work and work:
        what = f"{what}; the last work in the log: {work}"
    level = message.level
    precedence = cast(Precedence, message.role)
    if not kinds.isdisjoint(message.explains):
        level = "problem"
        # A failure that it does not explain is the likelier reason of what it explains.
        is_alone = failures <= {*message.explains}
        precedence = "explanation" if is_alone else "symptom"
    elif fault.is_info and precedence == "cause":
        # NCCL went on: what stopped the job is another line, if there is one.
        precedence = "explanation"
    return RankedFinding.of(precedence, level, message.kind, where, what, fault.fix, fault.moment)


def _plain_finding(fault: PlainFault, where: str) -> RankedFinding:
    likes = f" ({fault.num_like_it - 1} more like it)" if fault.num_like_it > 1 else ""
    if fault.is_exception:
        what = f"the program raised {fault.text}{likes}"
        return RankedFinding.of(
            "failure", "problem", "exception", where, what, EXCEPTION_FIRST, fault.moment
        )
    precedence: Precedence = "warned" if fault.is_warning else "unexplained"
    what = f"{fault.text}{likes}"
    return RankedFinding.of(precedence, "warning", UNEXPLAINED, where, what, moment=fault.moment)


def wait_findings(
    faults: JobFaults, *, ranks: set[int], links: Collection[str]
) -> Iterator[RankedFinding]:
    """Collectives that timed out. `ranks`: all that the logs show; `links`: the transports of ranks
    whose communicator was complete."""
    moment = faults.first_wait or START
    for wait in faults.waits.explanations(faults.ranks | ranks, faults.work):
        precedence: Precedence = "failure" if wait.is_cause else "symptom"
        ranked = RankedFinding.of(
            precedence, "problem", wait.kind, wait.where, wait.what, wait.fix, moment
        )
        yield _refined(ranked, faults, faults.wait_places, is_repeated=False)
        if wait.is_early and (explained := _silent_link(wait, links, moment)):
            yield explained


def _silent_link(
    wait: WaitExplanation, links: Collection[str], moment: LogMoment
) -> RankedFinding | None:
    """The ranks were connected, and the first data never arrived."""
    if any(link.startswith("P2P") for link in links):
        path = BROKEN_P2P
        fix = NO_P2P
    elif any(link.startswith("NET") and "Socket" not in link for link in links):
        path = BROKEN_RDMA
        fix = NO_RDMA
    elif any(link.startswith("NET") for link in links):
        path = BROKEN_TCP
        fix = NO_DATA
    else:
        return None
    what = f"all ranks were connected, and the first collective never finished: {path}"
    return RankedFinding.of("failure", "problem", "silent link", wait.where, what, fix, moment)

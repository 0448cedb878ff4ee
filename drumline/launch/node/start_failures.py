"""What the failures of ranks mean: which rank failed first, and whether a restart can help."""

from __future__ import annotations

from collections.abc import Iterable

from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from drumline.base.errors import ExitCode
from drumline.base.rank_environment import FailureRecord
from drumline.launch.node.rank_files import RankFiles
from drumline.watch.watch_folder import SidecarDiagnosis

# Ranks of a task that exit with one of these codes would do so again.
FINAL_CODES = frozenset({ExitCode.USAGE, ExitCode.PREFLIGHT_FAILED, ExitCode.HANG})
# Ranks of a task that exit with one of these codes are not restarted.
ENDING_CODES = FINAL_CODES | {ExitCode.PREEMPTED}


class StartFailures:
    """The failures of one start of a node's ranks."""

    def __init__(self, files: RankFiles, record_before: FailureRecord | None = None) -> None:
        """`record_before`: the failure that ended the start before this one."""
        self.files = files
        self.failed_first: list[int] = []
        """Global ranks in the order of their failures, without those that the agent ended
        itself."""
        self.record: FailureRecord | None = None
        """The failure of this start, as its ranks reported it."""
        self.diagnosis: SidecarDiagnosis | None = None
        """The sidecars' diagnosis of the failure that ended this start."""
        self.can_restart = True
        """Whether another start may get further, as far as the ranks reported it."""
        self._record_before = record_before

    def read(self, ranks: Iterable[int]) -> dict[int, FailureRecord]:
        """The failure records of ranks that have exited."""
        records = self.files.failures(ranks)
        for record in records.values():
            self.record = record
            if not record.can_restart or record.repeats(self._record_before):
                self.can_restart = False
        return records


def exit_codes_of(result: RunResult) -> set[int]:
    return {failure.exitcode for failure in result.failures.values()}


def first_failure(
    result: RunResult, diagnosis: SidecarDiagnosis | None
) -> tuple[int, ProcessFailure]:
    """The rank that the diagnosis blames, if it has failed here; otherwise the earliest failure of
    this node."""
    if diagnosis is not None and diagnosis.rank in result.failures:
        return diagnosis.rank, result.failures[diagnosis.rank]
    return min(result.failures.items(), key=lambda item: item[1].timestamp)

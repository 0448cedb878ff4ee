"""The files that an agent gives to its ranks: for their output, their failures, and that they have
saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import LogsDest

from drumline.base import rank_environment
from drumline.base.rank_environment import FailureRecord, read_failure
from drumline.launch.node.rank_logs import rank_file, rank_output


class RankFiles(LogsSpecs):
    """The files of ranks. torch would name them by local rank, and truncate those of an earlier
    start."""

    def __init__(self, scratch: str, folder: Path | None, first_start: int = 0) -> None:
        super().__init__(scratch, Std.NONE, Std.NONE)
        self.scratch = Path(scratch)
        self.folder = folder
        self.num_starts = first_start
        self.variables: Mapping[str, str] = {}
        """Variables for all ranks of the next start."""

    @property
    def root_log_dir(self) -> str:
        return str(self.folder or self.scratch)

    def failures(self, ranks: Iterable[int]) -> dict[int, FailureRecord]:
        """The records of these ranks, where they could write one in this start."""
        records = {rank: read_failure(self._failure_file(rank)) for rank in ranks}
        return {rank: record for rank, record in records.items() if record is not None}

    def _failure_file(self, rank: int) -> Path:
        return self.scratch / f"failure-{rank}-{self.num_starts - 1}.json"

    def reports_save(self, rank: int) -> bool:
        """Whether this rank was preempted in this start, and has reported that the run has
        saved."""
        return self._saved_file(rank).exists()

    def _saved_file(self, rank: int) -> Path:
        return self.scratch / f"saved-{rank}-{self.num_starts - 1}"

    def stderr(self, rank: int) -> Path | None:
        """The stderr file of that rank in this start; None: it writes to the screen."""
        if self.folder is None:
            return None
        _, stderr = rank_output(self.folder, rank, self.num_starts - 1)
        return stderr

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """torch's hook at each start: complete the environment of every rank, and name its
        files."""
        start = self.num_starts
        self.num_starts += 1
        dest = LogsDest()
        for local_rank, variables in envs.items():
            rank = int(variables["RANK"])
            error_file = str(self.scratch / f"error-{rank}-{start}.json")
            variables.update(self.variables)
            variables["TORCHELASTIC_ERROR_FILE"] = error_file
            variables[rank_environment.FAILURE_FILE] = str(self._failure_file(rank))
            variables[rank_environment.SAVED_FILE] = str(self._saved_file(rank))
            dest.error_files[local_rank] = error_file
            # An empty name does not redirect the stream.
            dest.stdouts[local_rank] = ""
            dest.stderrs[local_rank] = ""
            if self.folder is not None:
                stdout, stderr = rank_output(self.folder, rank, start)
                # An earlier launch with the same --logs may have left one.
                number_file = rank_file(self.folder, rank, start)
                number_file.unlink(missing_ok=True)
                variables[rank_environment.RANK_FILE] = str(number_file)
                dest.stdouts[local_rank] = str(stdout)
                dest.stderrs[local_rank] = str(stderr)
        dest.filtered_stdout = dest.filtered_stderr = str(self.scratch / "filtered")
        return dest

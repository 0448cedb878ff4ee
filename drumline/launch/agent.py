"""torchrun's agent, which says when it starts ranks again, and does not when that cannot help."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent


class TellingAgent(LocalElasticAgent):
    """Ranks that end with one of `final_codes` would end so again: they are not started once more."""

    def __init__(self, *args: Any, final_codes: Collection[int], goes_on: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.final_codes = final_codes
        self.goes_on = goes_on
        """How a restarted rank begins, for the user to read."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed() and any(
            failure.exitcode in self.final_codes for failure in result.failures.values()
        ):
            self._remaining_restarts = 0
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        done = worker_group.spec.max_restarts - self._remaining_restarts
        why = f"restart {done} of {worker_group.spec.max_restarts}" if done else "another node did so"
        print(f"drumline: starting the ranks again ({why}); {self.goes_on}", file=sys.stderr, flush=True)
        super()._restart_workers(worker_group)

"""torchrun's agent, which says when it starts ranks again and why, and does not when that cannot help."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from drumline.launch.node.rendezvous import FixedRanks
from drumline.launch.rank_environment import RESTARTED
from drumline.terminal import print_message


class TellingAgent(LocalElasticAgent):
    """Ranks that end with one of `final_codes` would end so again: they are not started once more."""

    def __init__(self, *args: Any, final_codes: Collection[int], goes_on: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.final_codes = final_codes
        self.goes_on = goes_on
        """How a restarted rank begins, for the user to read."""
        self._failed = False

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        handler = worker_group.spec.rdzv_handler
        if (
            result.state is WorkerState.SUCCEEDED
            and isinstance(handler, FixedRanks)
            and handler.may_be_needed()
        ):
            return RunResult(state=WorkerState.HEALTHY)  # torch asks again, and whether another node waits
        self._failed = result.is_failed()
        if self._failed and any(failure.exitcode in self.final_codes for failure in result.failures.values()):
            self._remaining_restarts = 0
        return result

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        handler = worker_group.spec.rdzv_handler
        with handler.explained() if isinstance(handler, FixedRanks) else contextlib.nullcontext():
            while True:
                # A node may die while the others wait for its word; those who are left meet once more.
                with contextlib.suppress(dist.DistStoreError):
                    self._meet(worker_group)
                    return

    def _meet(self, worker_group: WorkerGroup) -> None:
        """Each node may have failed by itself, or for another's sake: a restart of all counts once, and for all."""
        spec, handler = worker_group.spec, worker_group.spec.rdzv_handler
        if not isinstance(handler, FixedRanks):
            super()._rendezvous(worker_group)
            return
        handler.restarts_used = max(
            handler.restarts_used, spec.max_restarts - max(0, self._remaining_restarts)
        )
        super()._rendezvous(worker_group)
        self._remaining_restarts = max(0, spec.max_restarts - handler.restarts_used)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        spec = worker_group.spec
        why = f"restart {spec.max_restarts - self._remaining_restarts} of {spec.max_restarts}"
        if not self._failed and isinstance(spec.rdzv_handler, FixedRanks):
            why = spec.rdzv_handler.why_again
        print_message(f"starting the ranks again ({why}); {self.goes_on}")
        # torchrun's own count leaves out a start that another node was the reason for.
        os.environ[RESTARTED] = "1"
        super()._restart_workers(worker_group)

    def _exit_barrier(self) -> None:
        handler = self._worker_group.spec.rdzv_handler
        if isinstance(handler, FixedRanks):
            handler.wait_for_the_end()

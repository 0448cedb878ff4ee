"""What connects a rank with its job besides the process group: the store, the sidecar, and the
report of a failure.

Our engine has it as `connection` of its RunManager.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from drumline.base.errors import Place, summary
from drumline.base.rank_environment import Topology, watch_settings_from, write_failure
from drumline.config.schema import WatchConfig
from drumline.rank.failure import Failure, claim_failure
from drumline.rank.rendezvous.live_nodes import LiveNodes
from drumline.rank.rendezvous.rank_rendezvous import Rendezvous
from drumline.rank.sealed_store import SealedStore
from drumline.rank.torch_internals import compiler_callbacks
from drumline.rank.watched.node_watch import NodeWatch
from drumline.rank.watched.progress_monitor import ProgressMonitor
from drumline.rank.watched.watched_rank import WatchedRank, watch_rank
from drumline.watch.failure_kind import FailureKind, failure_kind
from drumline.watch.heartbeat import HeartbeatWriter, Phase
from drumline.watch.watch_folder import wait_for_diagnosis

# How long a rank that has lost a peer waits for the sidecar's diagnosis, after it has waited for
# other ranks' reports.
DIAGNOSED_S = 2.0
OUTSIDE_STEPS = (Phase.START, Phase.BETWEEN, Phase.EVALUATION, Phase.SAVE)


class JobConnection:
    """Of one rank; without a group or a sidecar its parts do nothing."""

    def __init__(self) -> None:
        self.heartbeat = HeartbeatWriter()
        """Read by the sidecar, if there is one."""

        self.rendezvous: Rendezvous | None = None
        self.topology = Topology()
        self.compilations: CompileMarks | None = None
        """None: torch's compiler is not loaded."""

        self._watched: WatchedRank | None = None
        """None: no sidecar watches this rank."""

        self._monitor: ProgressMonitor | None = None

    @property
    def store(self) -> SealedStore | None:
        """The key-value store of this job's ranks, which still works when the group is broken; None
        on one process."""
        return None if self.rendezvous is None else self.rendezvous.store

    @property
    def watch_folder(self) -> Path | None:
        """Where this node's sidecar and its ranks exchange files; None: there is no sidecar."""
        return None if self._watched is None else self._watched.folder

    def node_watch(
        self,
        config: WatchConfig,
        *,
        run: Path | None,
        environment: Mapping[str, str],
        live: LiveNodes | None = None,
        prometheus: str | None = None,
    ) -> AbstractContextManager[NodeWatch | None]:
        """For the rendezvous. None: this rank is not to be watched. `live`: a lost node does not
        end the others. `prometheus`: where the sidecar serves metrics."""
        is_needed = self.topology.world_size > 1 or prometheus is not None

        # An unknown name is an error.
        if not {"on": True, "auto": is_needed, "off": False}[config.sidecar]:
            return nullcontext()

        return NodeWatch(
            self.topology,
            config,
            watch_settings_from(environment),
            run=run,
            continues=live is not None,
            prometheus=prometheus or "",
        )

    def start_watchdog(
        self,
        node: NodeWatch,
        config: WatchConfig,
        *,
        sign: Callable[[], Hashable],
    ) -> None:
        """From here on a sidecar watches this rank, where it can. `sign` changes as the rank makes
        progress."""
        self._watched = watch_rank(node.options(self.rendezvous), self.topology.rank)
        if self._watched is not None:
            self.heartbeat = self._watched.heartbeat
            self.heartbeat.mark(Phase.USER)
            self._monitor = ProgressMonitor(self.heartbeat, patience_s=config.hang_s, sign=sign)

    def mark_compilations(self) -> None:
        """From here on the heartbeat shows when torch compiles, if its compiler is loaded."""
        handler = compiler_callbacks()
        if handler is not None:
            self.compilations = self.compilations or CompileMarks(self.heartbeat, handler)
            self.compilations.attach()

    def note_failure(self, error: BaseException) -> None:
        """Report the failure to the watchdog, before any call that may block."""
        recorder = self.heartbeat if self._watched is None else self._watched
        recorder.fail(summary(error), failure_kind(error))

    def claim_failure(
        self,
        error: BaseException,
        failure: Failure,
        *,
        environment: Mapping[str, str],
    ) -> Failure | None:
        """Report to the other ranks and the launcher that this rank has failed. None: it failed
        first; otherwise the earlier failure. If no rank has reported one, but this rank has lost a
        peer, the sidecar decides."""
        first = None
        if self.rendezvous is not None:
            by_rank_0 = not self.topology.agent_hosts_store and self.topology.world_size > 1
            first = claim_failure(
                self.rendezvous.store, failure, error, rank_0_hosts_store=by_rank_0
            )

        if (first is None or first.is_assumed) and failure_kind(error) is FailureKind.LOST_PEER:
            first = self._diagnosed_failure(failure) or first

        write_failure(environment, (first or failure).record())
        return first

    def _diagnosed_failure(self, failure: Failure) -> Failure | None:
        """The failure that the sidecar blames for the error of this rank; None: it blames this
        rank, or nobody yet."""
        if self.watch_folder is None:
            return None

        diagnosis = wait_for_diagnosis(self.watch_folder, time.monotonic() + DIAGNOSED_S)
        if diagnosis is None or diagnosis.rank == failure.place.rank:
            return None

        blamed = Place(host=diagnosis.host, rank=diagnosis.rank)
        return replace(failure, place=blamed, raised_by=failure.origin, diagnosis=diagnosis.what)

    def stop_monitor(self) -> None:
        """Before the process group is destroyed."""
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None

    def close(self) -> None:
        """The rank has left the group."""
        if self.compilations is not None:
            self.compilations.detach()
            self.compilations = None

        if self._watched is not None:
            self._watched.close()
        self._watched = self.rendezvous = None


@dataclass
class CompileMarks:
    """Torch calls it when a compilation begins and ends; steps that compile nothing do not."""

    heartbeat: HeartbeatWriter
    handler: Any
    _before: int = Phase.START
    began_at: dict[str, int] = field(default_factory=dict)
    """The compilations in steps that were not reported yet, by torch's id: the step at which
    each began. Not those in an evaluation: a model in evaluation mode is compiled again, as it
    should be."""

    reported: set[str] = field(default_factory=set)
    """The functions whose recompilation was reported."""

    is_usual_until: int = 0
    """The step up to which a recompilation is usual, and not reported."""

    def attach(self) -> None:
        """Also after a reset of the compiler, which forgets it."""
        if self._begin not in self.handler.start_callbacks:
            self.handler.register_start_callback(self._begin)
            self.handler.register_end_callback(self._end)

    def detach(self) -> None:
        """From here on torch does not call it."""
        if self._begin in self.handler.start_callbacks:
            self.handler.remove_start_callback(self._begin)
            self.handler.remove_end_callback(self._end)

    # These marks are not counted: a loop that has no others must still be recognized as one without
    # heartbeats.

    def _begin(self, started: Any) -> None:
        """A compilation begins."""
        self._before = self.heartbeat.phase
        if self._before not in OUTSIDE_STEPS:
            self.began_at[started.compile_id] = self.heartbeat.step
        self.heartbeat.mark(Phase.COMPILE, 0)

    def _end(self, _: Any) -> None:
        """The phase before continues."""
        self.heartbeat.mark(self._before, 0)

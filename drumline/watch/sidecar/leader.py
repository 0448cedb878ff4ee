"""The leading sidecar knows the state of all nodes: it notices when something is wrong, has all
nodes inspect their ranks, and makes the diagnosis. Every hub follows the run in the same way, so
that it can take over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from drumline.base.rank_environment import WITHOUT_WATCH, read_launcher_link
from drumline.base.text import join_names
from drumline.base.untrusted import from_json
from drumline.watch.cluster_state import (
    ANSWER_OF,
    Answer,
    ClusterState,
    LostNode,
    NodeState,
    ScriptReport,
)
from drumline.watch.diagnosis.diagnosis import Alarm, Cause, Diagnosis, RaisedAlarm
from drumline.watch.diagnosis.evidence import has_left
from drumline.watch.diagnosis.watchdog import Watchdog, diagnose, urgent_symptoms
from drumline.watch.script_differences import ScriptComparison
from drumline.watch.sidecar.local_ranks import LocalRanks
from drumline.watch.sidecar.sidecar_network import SidecarNetwork
from drumline.watch.sidecar.sidecar_options import Peer, SidecarOptions
from drumline.watch.sidecar.sidecar_reporter import SidecarReporter
from drumline.watch.status_file import Notice
from drumline.watch.stragglers import Stragglers

# Heartbeats come twice a second.
FRESH_S = 1.5
INSPECT_S = 2.0

# Sidecars start after the rendezvous of all ranks, so nearly at the same time; on a busy host
# later.
FIRST_CONNECTION_S = 30.0


@dataclass(eq=False)
class Leader:
    """What one sidecar knows about all nodes, and its decisions."""

    options: SidecarOptions
    local_ranks: LocalRanks
    network: SidecarNetwork
    reporter: SidecarReporter
    act: Callable[[RaisedAlarm], None]
    """Sends all nodes an alarm, and what to do about it."""

    def __post_init__(self) -> None:
        options = self.options
        self._latest: dict[int, NodeState] = {}
        """By node: what its last heartbeat had."""

        self._left: set[int] = set()
        """The nodes whose sidecar has sent its last heartbeat."""

        self._inspected: dict[int, NodeState] = {}
        """The answers to the current question, by node."""

        self._inspection = 0
        """The number of the current question."""

        self._watchdog = Watchdog(
            hang_s=options.hang_s,
            world_size=options.world_size,
            lost_s=options.lost_s,
        )
        self._stragglers = Stragglers(options.slow_factor)
        self._has_checked_connections = False

        self._scripts: dict[int, ScriptReport] = {}
        """The latest report of each rank."""

        self._has_new_scripts = False
        self._comparison = ScriptComparison(options.world_size)

        self.notices: list[Notice] = []
        self.is_urgent = False
        """Whether a rank has exited or was stopped since the last decision: then the next one is
        made at once."""

        self.has_acted = False
        """Whether the run was ended: what follows is not reported."""

    # What it receives

    def receive_heartbeat(self, node: int, message: Mapping[str, Any]) -> None:
        """From the sidecar of this node, twice a second."""
        before = self._latest.get(node)
        state = from_json(NodeState, message["state"])
        if before is not None and urgent_symptoms(before.ranks) != urgent_symptoms(state.ranks):
            self.is_urgent = True

        self._latest[node] = state
        if message.get("is_last"):
            self._left.add(node)

    def receive_script(self, rank: int, record: Mapping[str, Any]) -> None:
        """What a rank reports about its script."""
        self._scripts[rank] = from_json(ScriptReport, record)
        self._has_new_scripts = True

    def receive_inspected(self, node: int, message: Mapping[str, Any]) -> None:
        """The answer to the current question; answers to earlier ones are ignored."""
        if message["number"] == self._inspection:
            self._inspected[node] = from_json(NodeState, message["state"])

    def cluster(self, inspected: Mapping[int, NodeState] | None = None) -> ClusterState:
        """The current state, with the results of inspections where there are any."""
        self._latest[self.options.node] = self.local_ranks.state
        nodes = {**self._latest, **(inspected or {})}
        connected = self.network.heartbeat_ages()
        this_node = replace(nodes[self.options.node], heartbeat_age_s=connected)
        nodes[self.options.node] = this_node
        in_order = tuple(state for _, state in sorted(nodes.items()))

        lost = tuple(
            self._lost_node(state, connected[node])
            for node, state in nodes.items()
            if node not in self._left and connected.get(node, 0.0) > FRESH_S
        )

        # They have not started yet, or have exited already. If they still have not connected later,
        # while their ranks train, their port is closed to us, which is a warning.
        open_s = self.network.open_s()
        never_seen = tuple(
            self._lost_node(NodeState(node=node, host=peer.host), open_s)
            for node, peer in self._unconnected()
            if open_s < FIRST_CONNECTION_S
        )

        # The last report of a lost node still counts, and may explain why it is lost.
        return ClusterState(
            me=self.options.node,
            nodes=in_order,
            lost=lost,
            launcher=read_launcher_link(self.options.launcher_link) if lost else None,
            never_seen=never_seen,
        )

    def _unconnected(self) -> list[tuple[int, Peer]]:
        """The nodes whose sidecar has never connected."""
        connected = self.network.heartbeat_ages()
        return [(node, peer) for node, peer in self.network.peers.items() if node not in connected]

    def _lost_node(self, last: NodeState, no_heartbeat_s: float) -> LostNode:
        """By its last state, and what a new connection shows."""
        how = self.network.connect_result(last.node)
        return LostNode(
            node=last.node,
            host=last.host,
            ranks=tuple(rank.rank for rank in last.ranks),
            no_heartbeat_s=no_heartbeat_s,
            how=how,
            answer=ANSWER_OF.get(how, Answer.NONE),
        )

    def all_have_left(self) -> bool:
        """Whether every known rank is out of its loop without an error to report."""
        return all(map(has_left, self.cluster().ranks))

    # What it decides

    async def update(self, clock: Callable[[], float], *, leads: bool) -> None:
        """`clock`: the time in which this process had CPU time. `leads`: whether it reports and
        acts."""
        cluster = self.cluster()
        now = clock()
        recovery = self._watchdog.observe(cluster, now)
        self.is_urgent = self._watchdog.is_in_grace
        if not leads or self.has_acted:
            return

        if recovery is not None:
            ended = recovery.diagnosis
            self._notify("stall", rank=ended.rank, host=ended.host, message=recovery.sentence)

        self.report_differences()
        self._report_stragglers(cluster, now)
        self._check_connections(now)

        if self._watchdog.wants_evidence:
            inspected = self.cluster(await self._inspect())
            self._decide(diagnose(inspected), inspected, clock())

    def _report_stragglers(self, cluster: ClusterState, now: float) -> None:
        """Report ranks and hosts that have become stragglers."""
        # With the observed activity of scripts, whose ranks mark no phases.
        nodes = tuple(replace(node, ranks=node.activity or node.ranks) for node in cluster.nodes)
        observed = replace(cluster, nodes=nodes)

        for straggler in self._stragglers.observe(observed, now):
            self._notify(
                "straggler",
                rank=straggler.rank,
                host=straggler.host,
                message=straggler.sentence,
                what=straggler.what,
            )

    def report_differences(self) -> None:
        """Report new differences between the ranks of a script."""
        if not self._has_new_scripts:
            return

        self._has_new_scripts = False
        for difference in self._comparison.update(self._scripts):
            self._notify("difference", **asdict(difference))

    def _notify(self, kind: str, *, message: str, **place: Any) -> None:
        """Report through rank 0, and keep it for the status file."""
        self.reporter.notify(kind, message=message, **place)
        self.notices.append(Notice(kind, message))

    def _check_connections(self, now: float) -> None:
        """Warn once about nodes whose sidecar never connected although their ranks train: most
        often a closed port."""
        if self._has_checked_connections or now < FIRST_CONNECTION_S:
            return

        self._has_checked_connections = True
        names = []
        for node, peer in self._unconnected():
            place = f"{peer.address} port {peer.port}"
            if how := self.network.connect_result(node):
                place += f": {how}"
            names.append(f"{peer.host} ({place})")

        if not names:
            return

        message = (
            f"warning: the sidecar on {self.options.host} has no connection with {join_names(names, most=3)}: "
            "each side watches only its own ranks, and may not know which rank blocks the run. Try: let hosts reach "
            "each other on all TCP ports (drumline doctor --hosts finds those that cannot), or train without the "
            f"watchdog: {WITHOUT_WATCH}"
        )
        self.reporter.print(message)
        self.notices.append(Notice("warning", message))

    def _decide(self, diagnosis: Diagnosis | None, inspected: ClusterState, now: float) -> None:
        """Raise an alarm for this diagnosis if the watchdog says so: print, write, and act."""
        alarm = self._watchdog.decide(diagnosis, self.cluster(), now)
        if alarm is None or diagnosis is None:
            return

        is_stall = alarm == "stall"
        if is_stall:
            diagnosis = self._watchdog.with_duration(diagnosis, ends_job=self.options.ends_job)

        action = self._action(alarm, diagnosis)
        raised = RaisedAlarm(alarm=alarm, diagnosis=diagnosis, action=action)

        # The host that is cut off would print it when it is back; the others have printed it.
        is_cut_off = inspected.launcher is not None and inspected.launcher.is_cut_off
        if not diagnosis.is_ranks_error and not (is_cut_off and is_stall):
            self.reporter.print_alarm(alarm, raised.sentence)

        self.notices.append(Notice(alarm, raised.sentence))
        self.reporter.write_diagnosis(raised, inspected, time.time())
        if not is_stall:
            self.act(raised)

    def _action(self, alarm: Alarm, diagnosis: Diagnosis) -> str:
        """What is done about it: `restart`, `stop`, `report` or `none`."""
        if alarm != "hang":
            return "none"
        if self.options.continues and diagnosis.cause is Cause.UNREACHABLE:
            return "report"  # its ranks leave the group themselves, and continue without the node
        return self.options.on_hang

    async def _inspect(self) -> dict[int, NodeState]:
        """Inspect every node that sends heartbeats, including this one."""
        self._inspection += 1
        self._inspected = {}
        question = {"kind": "inspect", "number": self._inspection}

        ages = self.network.heartbeat_ages()
        connected = [node for node in ages if ages[node] <= FRESH_S and node not in self._left]
        nodes_asked = {node for node in connected if self.network.send(node, question)}

        with suppress(TimeoutError):
            async with asyncio.timeout(INSPECT_S):
                self._inspected[self.options.node] = await self.local_ranks.inspect()
                while not nodes_asked <= self._inspected.keys():
                    await asyncio.sleep(0.05)

        return self._inspected

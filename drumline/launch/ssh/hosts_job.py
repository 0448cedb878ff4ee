"""What a launch over ssh runs, and where; and the same once more, when a host's part of it was lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from drumline.launch.hosts import Host
from drumline.launch.node.guard import new_job
from drumline.launch.node_plan import NodePlan, Program
from drumline.launch.rank_environment import RESTARTED, ScriptWatch
from drumline.launch.ssh.frames import PROTOCOL
from drumline.net.secrets import new_secret


@dataclass(frozen=True, kw_only=True)
class HostsJob:
    """What runs, and where."""

    job: str
    hosts: Sequence[Host]
    nodes: Sequence[NodePlan]
    program: Program
    client: Sequence[str]
    """The words that call ssh."""
    python: str
    python_path: str | None = None
    cwd: Path
    logs: Path
    task_logs: Path | None = None
    """Where ranks of a task write by themselves."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    grace_s: float
    min_nodes: int | None = None
    """As long as so many hosts are there, the loss of one that is not the first does not end the job; None: all."""
    secret: str = field(default_factory=new_secret, repr=False)
    """What the nodes of this attempt know each other by."""
    script_watch: ScriptWatch | None = None
    standby: bool = True
    """Whether processes with torch loaded wait for a restart."""
    spares: Sequence[Host] = ()
    """Hosts that take the place of one that does not answer."""
    next_job: str = field(default_factory=new_job)
    """The name of the next attempt: nothing of this one is taken for a part of that. What waits for it carries it."""
    earlier: tuple[str, ...] = ()
    """The names of the attempts before this one; what is left of them on a host is ended first."""
    first_start: int = 0
    """Starts of ranks are numbered over all attempts: each has log files of its own."""

    def spec(self, node: NodePlan) -> dict[str, Any]:
        """What a supervisor is told first."""
        return {
            "kind": "spec",
            "protocol": PROTOCOL,
            "job": self.job,
            "next_job": self.next_job,
            "earlier": self.earlier,
            "node": asdict(node),
            "program": asdict(self.program),
            "environment": {**self.environment, **({RESTARTED: "1"} if self.earlier else {})},
            "logs": str(self.logs),
            "task_logs": str(self.task_logs) if self.task_logs else None,
            "grace_s": self.grace_s,
            "secret": self.secret,
            "script_watch": asdict(self.script_watch) if self.script_watch else None,
            "first_start": self.first_start,
            "standby": self.standby,
        }

    def placed(self, hosts: Sequence[Host]) -> list[NodePlan]:
        """The nodes on these hosts, of which some may be spares; they meet at the first."""
        port = self.nodes[0].endpoint.rpartition(":")[2]
        endpoint, peers = f"{hosts[0].address}:{port}", tuple(host.address for host in hosts)
        procs = [host.slots or node.num_procs for node, host in zip(self.nodes, hosts, strict=True)]
        return [
            replace(node, endpoint=endpoint, peers=peers, address=host.address, num_procs=num_procs)
            for node, host, num_procs in zip(self.nodes, hosts, procs, strict=True)
        ]

    def again(
        self, hosts: Sequence[Host], spares: Sequence[Host], *, restarts_left: int, first_start: int
    ) -> HostsJob:
        """The next attempt."""
        nodes = [replace(node, max_restarts=restarts_left, job=self.next_job) for node in self.placed(hosts)]
        return replace(
            self,
            job=self.next_job,
            next_job=new_job(),
            hosts=hosts,
            nodes=nodes,
            spares=spares,
            secret=new_secret(),
            earlier=(*self.earlier, self.job),
            first_start=first_start,
        )

"""What a launch over ssh runs, where, and with which variables; and the next attempt, after a host
was lost."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from drumline.base.job_secret import new_secret
from drumline.base.json_output import IS_WRAPPED
from drumline.base.rank_environment import RESTARTED, ScriptWatch
from drumline.launch.hosts import Host
from drumline.launch.node.guard import new_job
from drumline.launch.node_plan import NodePlan, Program, nodes_of_hosts, silence_limit_s
from drumline.launch.ssh.client import ALIVE_INTERVAL_S, remote_module, ssh_words
from drumline.launch.ssh.supervisor import PROTOCOL

# Variables that configure communication libraries, and must be the same on all ranks.
PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "UCX_", "FI_")
NAMES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_ORDER",
    "DATASET_DIR",
    IS_WRAPPED,
)
# What a supervisor gets as it is.
SENT_FIELDS = ("job", "earlier", "grace_s", "lease_s", "secret", "first_start", "standby")
# ssh's limit for each try to reach a host that answered before.
RECONNECT_TIMEOUT_S = 5
VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class HostsJob:
    """One attempt of a launch: what runs, and where."""

    program_there: ClassVar[str] = "drumline.launch.ssh.supervisor"
    """What ssh starts on each host."""
    job: str
    """The name that all processes of this attempt have in their environment."""
    hosts: Sequence[Host]
    nodes: Sequence[NodePlan]
    """Of the hosts, in their order."""
    program: Program
    client: Sequence[str]
    """The words that call ssh."""
    python: str
    """On the hosts, unless one has another."""
    python_path: str | None = None
    """Their PYTHONPATH."""
    cwd: Path
    """The folder in which it runs on each host."""
    logs: Path
    """For the output of ranks, on each host."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables for the ranks."""
    grace_s: float
    """How long ranks may take to exit after a SIGTERM."""
    min_nodes: int | None = None
    """While this many hosts are left, losing a host other than the first does not end the job;
    None: all are needed."""
    secret: str = field(default_factory=new_secret, repr=False)
    """Shared by the nodes of this attempt."""
    script_watch: ScriptWatch | None = None
    standby: bool = True
    """Whether processes with torch loaded wait for a restart."""
    keep_going: bool = False
    """Whether the job resumes after a preemption that left its hosts usable, and after a full
    disk."""
    full_disks: Mapping[str, str] = field(default_factory=dict)
    """By the address of a host: the folder whose disk was full; its part begins when there is space
    again."""
    spares: Sequence[Host] = ()
    """Hosts that replace one that does not answer."""
    earlier: tuple[str, ...] = ()
    """The names of earlier attempts; processes that they left on a host are ended first."""
    first_start: int = 0
    """Starts of ranks are numbered over all attempts: each has its own log files."""

    @property
    def lease_s(self) -> float:
        """How long the launcher and a host may receive no heartbeat of each other before the host
        counts as lost. A job with `--nnodes` continues without a node sooner, which the nodes
        decide among themselves: a launcher that is cut off for less than `--lost-after` ends none
        of them."""
        return float(silence_limit_s(self.nodes[0].lost_after_s))

    def spec(self, node: NodePlan) -> dict[str, Any]:
        """The first frame to a supervisor."""
        restarted = {RESTARTED: "1"} if self.earlier else {}
        return {
            **{name: getattr(self, name) for name in SENT_FIELDS},
            "kind": "spec",
            "protocol": PROTOCOL,
            "node": asdict(node),
            "names": [host.address for host in self.hosts if not host.inner_address],
            "program": asdict(self.program),
            "environment": {**self.environment, **restarted},
            "logs": str(self.logs),
            "full_disk": self.full_disks.get(node.address or "", ""),
            "script_watch": self.script_watch and asdict(self.script_watch),
        }

    def supervisor_command(self, host: Host) -> list[str]:
        """The local command that runs a supervisor there."""
        client = list(self.client)
        if self.earlier:
            client.append(f"-oConnectTimeout={RECONNECT_TIMEOUT_S}")
        # Our own heartbeats notice a cut before ssh does. ssh uses the first option of a name.
        client.append(f"-oServerAliveCountMax={round(self.lease_s / ALIVE_INTERVAL_S) + 2}")
        supervisor = remote_module(self.program_there, host.python or self.python, self.python_path)
        return ssh_words(client, host, supervisor, cwd=Path(host.folder or self.cwd))

    def placed(self, hosts: Sequence[Host]) -> list[NodePlan]:
        """The nodes on these hosts, some of which may be spares."""
        return nodes_of_hosts(hosts, self.nodes[0].master_port, self.nodes)

    def joining_again(self, first_start: int) -> HostsJob:
        """The same attempt for a host that was lost and answers again; what is left there of its
        ranks is ended."""
        return replace(self, earlier=(*self.earlier, self.job), first_start=first_start)

    def again(
        self,
        hosts: Sequence[Host],
        spares: Sequence[Host],
        *,
        restarts_used: int,
        first_start: int,
        reached_step: int,
        full_disks: Mapping[str, str],
    ) -> HostsJob:
        """The next attempt."""
        job = new_job()
        nodes = [
            replace(node, restarts_used=restarts_used, reached_step=reached_step, job=job)
            for node in self.placed(hosts)
        ]
        return replace(
            self,
            job=job,
            hosts=hosts,
            nodes=nodes,
            spares=spares,
            full_disks=full_disks,
            secret=new_secret(),
            earlier=(*self.earlier, self.job),
            first_start=first_start,
        )


def wrong_variables(flag_values: Iterable[str], environment: Mapping[str, str]) -> Iterator[str]:
    """The mistakes in the values of `--env`; only names are shown."""
    for number, word in enumerate(flag_values, start=1):
        name, equals, _ = word.partition("=")
        if not VARIABLE_NAME.fullmatch(name):
            yield f"--env: number {number} is neither NAME nor NAME=VALUE"
        elif not equals and name not in environment:
            yield f"--env {name}: is not set here; set it, or give --env {name}=VALUE"


def variables_for_ranks(
    flag_values: Iterable[str], environment: Mapping[str, str]
) -> dict[str, str]:
    """The environment to add on every host, through ssh's stdin: some variables always, others by
    `--env`."""
    always = {
        name: value
        for name, value in environment.items()
        if name.startswith(PREFIXES) or name in NAMES
    }
    return always | chosen_variables(flag_values, environment)


def chosen_variables(flag_values: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Those of `--env`."""
    words = (word.partition("=") for word in flag_values)
    return {name: value if equals else environment[name] for name, equals, value in words}

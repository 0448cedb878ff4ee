"""What each node of a job runs, and how; and the same as a command to type or to put into a
manifest.

The node that Drumline starts itself (`node/local.py`) has the same settings, given to torchrun's
agent directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from drumline.base.rank_environment import LOST_AFTER_S, ScriptWatch
from drumline.launch.hosts import Host, wrong_name, wrong_port
from drumline.launch.node.guard import DEFAULT_GRACE_S, new_job

if TYPE_CHECKING:
    from drumline.launch.node.standby import Standby

RUN_ID = "drumline"
DEFAULT_PORT = 29500
# The same as torchrun's defaults.
JOIN_TIMEOUT_S = 600
LAST_CALL_S = 30
KEEP_ALIVE_ATTEMPTS = 3
# Unless it is 1, all starts of a job share one store, in which gloo finds addresses of the previous
# start.
OWN_STORE_ENV = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
# Runs a script as Python would, with the watchdog.
SCRIPT_RUNNER = "drumline.parallel.scripts.script_runner"
TASK_RESTARTS = 3
SCRIPT_RESTARTS = 0


@dataclass(frozen=True, kw_only=True)
class NodePlan:
    """One machine's part of a job."""

    num_nodes: int = 1
    node_rank: int = 0
    num_procs: int | None = 1
    """Ranks here; None: one per GPU."""
    endpoint: str = ""
    """`HOST:PORT` of the nodes' rendezvous; empty for a single node, which needs no fixed port."""
    address: str | None = None
    """The address of this node for the others, if it was given."""
    max_restarts: int = 0
    """How often failed ranks are restarted without getting any further."""
    restarts_used: int = 0
    """How many of these were used before this attempt, at `reached_step`."""
    reached_step: int = 0
    """The furthest step of the attempts before; 0 where steps are not known."""
    min_nodes: int | None = None
    """The job continues with this many nodes when others are missing; None: all are needed."""
    peers: tuple[str, ...] = ()
    """The user's name for each node, by node rank, if known."""
    join_timeout_s: int = JOIN_TIMEOUT_S
    last_call_s: int = LAST_CALL_S
    """How long `min_nodes` wait for the rest before they start without them."""
    lost_after_s: int = LOST_AFTER_S
    """A node that is cut off for less than this is not lost."""
    job: str = ""
    """The job's name, where one launcher gave it to all nodes: two jobs may use the same port."""

    may_be_rebooting: bool = False
    """Whether the first node may be away for as long as the join timeout."""

    @property
    def may_shrink(self) -> bool:
        """Whether the job continues without a node that is missing."""
        return self.min_nodes is not None and self.min_nodes < self.num_nodes

    @property
    def silence_s(self) -> int:
        """A node without a heartbeat for this long is lost. A job that can continue without it does
        not wait for what TCP sends again."""
        return self.lost_after_s if self.may_shrink else silence_limit_s(self.lost_after_s)

    @property
    def master_addr(self) -> str:
        """The host of the endpoint, by the name or address that was given."""
        return self.endpoint.rpartition(":")[0]

    @property
    def master_port(self) -> int:
        """The port of the endpoint."""
        return int(self.endpoint.rpartition(":")[2])

    @property
    def known_address(self) -> str:
        """The address of this node for the others, as far as it is known: they reach the first node
        at the endpoint."""
        return self.address or (self.master_addr if self.node_rank == 0 else "")


def split_endpoint(text: str) -> tuple[str, str]:
    """The address and the port of `ADDR[:PORT]`, neither of them checked."""
    address, _, port = text.partition(":")
    return address, port or str(DEFAULT_PORT)


def wrong_endpoint(text: str) -> str | None:
    """What is wrong with `ADDR[:PORT]`; None: nothing."""
    address, port = split_endpoint(text)
    return wrong_name(address) or wrong_port(port)


def silence_limit_s(cut_s: int) -> int:
    """How long heartbeats may be missing if a cut of this length is to lose nobody: TCP sends again
    after pauses that double, so what was sent during a cut may arrive when twice its length has
    passed."""
    return 2 * cut_s + 5


@dataclass(frozen=True)
class Program:
    """What each rank runs."""

    words: tuple[str, ...]
    """A script and its arguments, or the arguments of `drumline`."""
    is_task: bool = False
    is_watched: bool = False
    profile: Sequence[str] = ()
    """Of a script: which steps to profile, the folder, and `only` to end it after them, or
    `all`."""
    run: str | None = None
    """The run folder that the same command resumes, as the settings of a task name it; None: it
    resumes nothing, such as a script or an evaluation."""
    continues: bool = False
    """Whether the ranks of other nodes continue without those of a lost one, as far as the settings
    were read."""

    def python_arguments(self) -> list[str]:
        """Python's own arguments for a rank."""
        if self.profile:
            mode = "watched" if self.is_watched else "plain"
            return ["-m", SCRIPT_RUNNER, "--profile", *self.profile, mode, *self.words]
        if self.is_watched:
            return ["-m", SCRIPT_RUNNER, *self.words]
        return ["-m", "drumline", *self.words] if self.is_task else list(self.words)

    def torchrun_arguments(self) -> list[str]:
        """The same for torchrun."""
        # The `--` keeps torchrun from parsing the rest: it reads `--run` as a prefix of its own
        # `--run-path`.
        return ["-m", "--", "drumline", *self.words] if self.is_task else ["--", *self.words]


@dataclass(frozen=True)
class Supervision:
    """How the agent of a node supervises its ranks, and where it reports what they do."""

    job: str = field(default_factory=new_job)
    grace_s: float = DEFAULT_GRACE_S
    """The time between SIGTERM and SIGKILL for ranks that must exit."""
    folder: Path | None = None
    """The folder for the output of ranks; None: they write to the screen."""
    report: Callable[..., None] = lambda kind, **content: None
    """Called with starts and failures of ranks, at once, since ending the others may take long.
    Times are by this machine's monotonic clock; the controller knows its offset."""
    secret: str | None = field(default=None, repr=False)
    """The secret that all nodes of the job were given, or None (`base/job_secret.py`)."""
    script_watch: ScriptWatch | None = None
    """How a script is watched; a task has its own settings for that."""
    standby: Standby | None = None
    """The standby processes in which restarted ranks of a task begin."""
    first_start: int = 0
    """The number of the first start of ranks here: earlier attempts of the launch have lower
    numbers."""


def task_program(task: str, arguments: Sequence[str], *defaults: tuple[str, str | None]) -> Program:
    """`drumline train TASK`, with each default (a flag and its value) that the user did not set."""
    added = []
    for flag, value in defaults:
        is_set = any(word == flag or word.startswith(f"{flag}=") for word in arguments)
        if value is not None and not is_set:
            added += [flag, value]
    return Program(("train", task, *arguments, *added), is_task=True)


def nodes_of_hosts(hosts: Sequence[Host], port: int, nodes: Sequence[NodePlan]) -> list[NodePlan]:
    """These nodes, each on its host, with as many ranks as that has slots; their rendezvous is at
    the first."""
    return [
        replace(
            node,
            num_nodes=len(hosts),
            node_rank=rank,
            num_procs=host.slots or node.num_procs,
            endpoint=f"{hosts[0].network_address}:{port}",
            address=host.network_address,
            peers=tuple(peer.address for peer in hosts),
        )
        for rank, (host, node) in enumerate(zip(hosts, nodes, strict=True))
    ]


def torchrun_command(node: NodePlan, program: Program) -> list[str]:
    """The words to type on that node."""
    procs = "gpu" if node.num_procs is None else str(node.num_procs)
    least = f"{node.min_nodes}:" if node.may_shrink else ""
    flags = ["--nnodes", f"{least}{node.num_nodes}", "--nproc-per-node", procs]
    flags += ["--max-restarts", str(node.max_restarts), *_rendezvous_flags(node)]
    # With a single agent, its count of restarts distinguishes starts in the shared store.
    environment = ["env", f"{OWN_STORE_ENV}=1"] if node.num_nodes > 1 else []
    return [*environment, "torchrun", *flags, *program.torchrun_arguments()]


def _rendezvous_flags(node: NodePlan) -> list[str]:
    """How torchrun finds the other nodes."""
    flags = ["--rdzv-backend", "c10d"]
    if not node.endpoint:
        return [*flags, "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]

    # Set which node hosts the rendezvous: torchrun decides by what the name resolves to.
    settings = [f"is_host={'true' if node.node_rank == 0 else 'false'}"]
    if node.join_timeout_s != JOIN_TIMEOUT_S:
        settings.append(f"join_timeout={node.join_timeout_s}")
    if node.last_call_s != LAST_CALL_S:
        settings.append(f"last_call_timeout={node.last_call_s}")
    if node.lost_after_s != LOST_AFTER_S:
        settings.append(f"keep_alive_interval={max(1, node.lost_after_s // KEEP_ALIVE_ATTEMPTS)}")
    flags += ["--rdzv-endpoint", node.endpoint, "--rdzv-id", RUN_ID]
    flags += ["--rdzv-conf", ",".join(settings)]
    return [*flags, "--local-addr", node.known_address] if node.known_address else flags

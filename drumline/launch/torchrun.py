"""One node of a job in torchrun's words: what is printed for a person to type, or written into a manifest.

The node that Drumline starts itself (`node/local.py`) has the same settings, given to torchrun's agent directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

RUN_ID = "drumline"
DEFAULT_PORT = 29500
# The same as torchrun's own.
JOIN_TIMEOUT_S = 600
LAST_CALL_S = 30
LOST_AFTER_S = 15
KEEP_ALIVE_ATTEMPTS = 3
# Without it all attempts of a job share one store, and gloo finds the addresses of the attempt before in it.
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
# Runs a script as Python would, under the watch.
SCRIPT_RUNNER = "drumline.watch.rank.script"


@dataclass(frozen=True, kw_only=True)
class Node:
    """One machine's part of a job."""

    num_nodes: int = 1
    node_rank: int = 0
    num_procs: int | None = 1
    """Ranks here; None is one per GPU."""
    endpoint: str = ""
    """`HOST:PORT` where the nodes meet; empty when there is one node only, which needs no fixed port."""
    address: str | None = None
    """What the other nodes call this one; None leaves that to torchrun, which asks for the host's full name."""
    max_restarts: int = 0
    min_nodes: int | None = None
    """The job goes on with so many nodes when others are missing; None needs all."""
    peers: tuple[str, ...] = ()
    """What the user calls each node, by node rank, where that is known."""
    join_timeout_s: int = JOIN_TIMEOUT_S
    """How long nodes wait for each other."""
    last_call_s: int = LAST_CALL_S
    """How long `min_nodes` wait for the rest before they go on without."""
    lost_after_s: int = LOST_AFTER_S
    """A node that was not heard for so long is gone."""
    job: str = ""
    """The job's own name, where one starter gave it to all nodes: two jobs may take the same port."""

    @property
    def may_shrink(self) -> bool:
        """Whether the job goes on without a node that is missing."""
        return self.min_nodes is not None and self.min_nodes < self.num_nodes


@dataclass(frozen=True)
class Program:
    """What every rank runs."""

    words: tuple[str, ...]
    """A script and its arguments, or the arguments of `drumline`."""
    is_task: bool = False
    is_watched: bool = False
    """A script that is run beside what lets a sidecar see it."""
    run: str | None = None
    """The run folder of a task, as its settings name it; None where they were not read."""

    def of_python(self) -> list[str]:
        """The arguments of Python."""
        if self.is_watched:
            return ["-m", SCRIPT_RUNNER, *self.words]
        return ["-m", "drumline", *self.words] if self.is_task else list(self.words)

    def of_torchrun(self) -> list[str]:
        # The bare dashes keep torchrun's hands off what follows: it takes `--run` for a prefix of its own `--run-path`.
        return ["-m", "--", "drumline", *self.words] if self.is_task else ["--", *self.words]


def torchrun_command(node: Node, program: Program) -> list[str]:
    """The words to type on that node."""
    procs = "gpu" if node.num_procs is None else str(node.num_procs)
    least = f"{node.min_nodes}:" if node.may_shrink else ""
    flags = ["--nnodes", f"{least}{node.num_nodes}", "--nproc-per-node", procs]
    flags += ["--max-restarts", str(node.max_restarts), *rendezvous_flags(node)]
    # A single agent's count of restarts is the job's, so there the shared store can tell attempts apart.
    environment = ["env", OWN_STORE] if node.num_nodes > 1 else []
    return [*environment, "torchrun", *flags, *program.of_torchrun()]


def rendezvous_flags(node: Node) -> Sequence[str]:
    """How the nodes find each other."""
    if not node.endpoint:
        return ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    flags = ["--rdzv-backend", "c10d", "--rdzv-endpoint", node.endpoint, "--rdzv-id", RUN_ID]
    # Whether it is the meeting place is not left to torchrun, which goes by what the name resolves to.
    flags += ["--rdzv-conf", ",".join(_rendezvous_settings(node))]
    return [*flags, "--local-addr", node.address] if node.address else flags


def _rendezvous_settings(node: Node) -> list[str]:
    settings = [f"is_host={'true' if node.node_rank == 0 else 'false'}"]
    if node.join_timeout_s != JOIN_TIMEOUT_S:
        settings.append(f"join_timeout={node.join_timeout_s}")
    if node.last_call_s != LAST_CALL_S:
        settings.append(f"last_call_timeout={node.last_call_s}")
    if node.lost_after_s != LOST_AFTER_S:
        settings.append(f"keep_alive_interval={max(1, node.lost_after_s // KEEP_ALIVE_ATTEMPTS)}")
    return settings

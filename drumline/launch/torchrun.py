"""One node of a job in torchrun's words: what is printed for a person to type, or written into a manifest.

The node that Drumline starts itself (`local.py`) has the same settings, given to torchrun's agent directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

RUN_ID = "drumline"
DEFAULT_PORT = 29500
# Without it all attempts of a job share one store, and gloo finds the addresses of the attempt before in it.
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"


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


@dataclass(frozen=True)
class Program:
    """What every rank runs."""

    words: tuple[str, ...]
    """A script and its arguments, or the arguments of `drumline`."""
    is_task: bool = False

    def of_python(self) -> list[str]:
        """The arguments of Python."""
        return ["-m", "drumline", *self.words] if self.is_task else list(self.words)

    def of_torchrun(self) -> list[str]:
        # The bare dashes keep torchrun's hands off what follows: it takes `--run` for a prefix of its own `--run-path`.
        return ["-m", "--", "drumline", *self.words] if self.is_task else ["--", *self.words]


def torchrun_command(node: Node, program: Program) -> list[str]:
    """The words to type on that node."""
    procs = "gpu" if node.num_procs is None else str(node.num_procs)
    flags = ["--nnodes", str(node.num_nodes), "--nproc-per-node", procs]
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
    flags += ["--rdzv-conf", f"is_host={'true' if node.node_rank == 0 else 'false'}"]
    return [*flags, "--local-addr", node.address] if node.address else flags

"""How the nodes of a launch find each other: how many there are, their backend and their address."""

from __future__ import annotations

from drumline_lint.reading.launchers import ACCELERATE, DEEPSPEED, Flag, Launch
from drumline_lint.reading.shell_parser import Kind, Word

LOOPBACK = {"localhost", "127.0.0.1", "::1", "[::1]", "0.0.0.0", "localhost.localdomain"}  # noqa: S104
DYNAMIC_BACKENDS = {"c10d", "etcd", "etcd-v2"}
_NODES_FLAG = {ACCELERATE: "num-machines", DEEPSPEED: "num-nodes"}


def nodes_flag(launch: Launch) -> str:
    return _NODES_FLAG.get(launch.kind, "nnodes")


def most_nodes(launch: Launch) -> int | None:
    """The largest number of nodes that it joins; None if it is known only at run time."""
    return _nodes(launch, least=False)


def least_nodes(launch: Launch) -> int | None:
    """The number of nodes that it waits for."""
    return _nodes(launch, least=True)


def _nodes(launch: Launch, *, least: bool) -> int | None:
    name = nodes_flag(launch)
    if name not in launch.flags:
        is_known = launch.is_sure and launch.kind not in {ACCELERATE, DEEPSPEED}
        return 1 if is_known and not _is_set_by_operator(launch) else None
    written = launch.value(name)
    first, _, last = (written or launch.default(name) or "").partition(":")
    text = first if least else last or first
    count = int(text) if text.isascii() and text.isdigit() and len(text) < 7 else None
    # A script whose default is one node is often started with more.
    return None if written is None and count == 1 else count


def _is_set_by_operator(launch: Launch) -> bool:
    container = launch.script.container
    return container is not None and container.sets_torchrun_flags


def backend(launch: Launch) -> str:
    """How the nodes find each other; empty when it is not known."""
    if "standalone" in launch.flags:
        return "c10d"
    if "rdzv-backend" not in launch.flags:
        return "static" if launch.is_sure else ""
    return launch.value("rdzv-backend") or ""


def address_flag(launch: Launch) -> Flag | None:
    """The flag whose address counts."""
    if launch.kind == ACCELERATE:
        return launch.flags.get("main-process-ip")
    endpoint = launch.flags.get("rdzv-endpoint")
    if endpoint is not None or backend(launch) != "static":
        return endpoint
    return launch.flags.get("master-addr")


def port_flag(launch: Launch) -> Flag | None:
    if launch.kind == ACCELERATE:
        return launch.flags.get("main-process-port")
    return launch.flags.get("rdzv-endpoint") or launch.flags.get("master-port")


def host_of(launch: Launch, address: Word) -> str | None:
    """The host in `host:port`, if it follows from the script; the port may be unknown."""
    whole = launch.script.constant(address)
    if whole is None:
        whole = launch.script.default(_without_port(address))
    if whole is None:
        return None
    is_ipv6 = whole.startswith("[") or whole.count(":") > 1
    if is_ipv6:
        return whole.partition("]")[0] + "]" if whole.startswith("[") else whole
    return whole.partition(":")[0]


def _without_port(address: Word) -> Word:
    """The pieces before the first colon."""
    pieces = []
    for piece in address.pieces:
        if piece.kind is Kind.TEXT and ":" in piece.text:
            pieces.append(piece._replace(text=piece.text.partition(":")[0]))
            break
        pieces.append(piece)
    return Word(address.start, address.end, tuple(pieces))

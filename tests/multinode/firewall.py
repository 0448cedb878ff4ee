"""What a host lets in, by nft: each function adds to what is closed already, `lift` opens all
again.

Dropped packets get no answer, as with a security group: whoever sends them waits.
"""

from __future__ import annotations

from tests.multinode.hosts import Host

TABLE = """
add table inet testbed
add chain inet testbed incoming {{ type filter hook input priority 0; policy accept; }}
add chain inet testbed outgoing {{ type filter hook output priority 0; policy accept; }}
{rules}
"""


def _add(host: Host, *rules: str) -> None:
    lines = "\n".join(f"add rule inet testbed {rule}" for rule in rules)
    host.space.configure(["nft", "-f", "-"], text=TABLE.format(rules=lines))


def drop_port(host: Host, port: int) -> None:
    """Packets of others to this TCP port of the host, of open connections too."""
    _add(host, f"incoming iifname != lo tcp dport {port} drop")


def close_all_but(host: Host, *ports: int) -> None:
    """As AWS does it: new TCP connections to other ports are not let in; answers, and what is open
    already, are."""
    _add(
        host,
        "incoming iifname lo accept",
        "incoming ct state established,related accept",
        *(f"incoming tcp dport {port} accept" for port in ports),
        "incoming meta l4proto tcp drop",
    )


def drop_from(host: Host, sender: Host) -> None:
    """All that one other host sends to this one; the way back stays open."""
    _add(host, f"incoming ip saddr {sender.address} drop")


def drop_larger(host: Host, num_bytes: int, *, but_port: int | None = None) -> None:
    """Packets over a size vanish on their way in, and nobody is told: a black hole, as a wrong MTU
    makes it. ssh sends large packets too when it logs in: with `but_port` 22 it still can."""
    if but_port is not None:
        _add(host, f"incoming tcp dport {but_port} accept", f"incoming tcp sport {but_port} accept")
    _add(host, f"incoming iifname != lo meta length > {num_bytes} drop")


def drop_everything(host: Host) -> None:
    """Both directions; the host's own loopback still works."""
    _add(host, "incoming iifname != lo drop", "outgoing oifname != lo drop")


def lift(host: Host) -> None:
    # Adding it first makes this right for a host that has no table.
    host.space.configure(
        ["nft", "-f", "-"], text="add table inet testbed\ndelete table inet testbed\n"
    )

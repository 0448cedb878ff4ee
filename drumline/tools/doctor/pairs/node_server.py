"""The doctor's program on each host: answers requests until its caller disconnects.

`python -m drumline.tools.doctor.pairs.node_server` is started over ssh, with frames on stdin and
stdout: that works when every other port is closed. `drumline doctor --node-rank K` runs the same
over a connection to node 0 (`without_ssh.py`). A frame names one of the fixed actions below, and is
read as the request of that action; nothing that is received is executed. torch is not imported here,
only in the ranks of the collectives.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from msgspec import Meta, to_builtins

from drumline.base.background import resolve_all
from drumline.base.errors import DrumlineError, PreflightError
from drumline.base.rank_environment import own_variables
from drumline.base.text import print_message
from drumline.base.untrusted import from_json
from drumline.net.dial import Reason
from drumline.net.frames import FrameError, FrameReader, Message, write_all
from drumline.net.interfaces import Interface, gloo_interface, interfaces, nccl_interface
from drumline.tools.doctor.finding import JsonObject
from drumline.tools.doctor.machine.machine_facts import HostSettings, host_facts
from drumline.tools.doctor.pairs.probe import (
    TOKEN_BYTES,
    Listeners,
    NodeNumber,
    Port,
    Target,
    measure,
    probe_all,
)
from drumline.tools.doctor.ranks.rank_processes import HostRanks, RankProcesses

# The caller sends a message every few seconds. If none arrives, the network is broken, and sshd
# would keep us running for hours.
SILENCE_S = 30.0
# The resolver's own limit is 5 s or more per attempt, which is too long to wait for a name.
RESOLVE_S = 3.0
PROTOCOL = 5


@dataclass(frozen=True)
class Introduction:
    """What a host says of itself: the answer to `begin`."""

    host: str
    interfaces: list[JsonObject]
    gloo: JsonObject | None
    nccl: JsonObject | None
    variables: dict[str, str]
    reached_at: str | None


@dataclass(frozen=True)
class NamesRequest:
    """Which names to look up."""

    names: Annotated[list[str], Meta(max_length=4096)]


@dataclass(frozen=True)
class ListenRequest:
    """High ports at the main address, one at every other address, and the rendezvous port."""

    token: Annotated[str, Meta(pattern=f"^[0-9a-f]{{{2 * TOKEN_BYTES}}}$")]
    node: NodeNumber
    address: str
    ports: Annotated[int, Meta(ge=1, le=8)]
    other_addresses: Annotated[list[str], Meta(max_length=16)]
    rendezvous_port: Port | None = None
    """None: it is on another host."""


@dataclass
class OpenPorts:
    """The answer to it. `other_ports`: by the address."""

    data: list[Port]
    other_ports: dict[str, Port]
    rendezvous_port: Port | None = None
    rendezvous_error: str | None = None


@dataclass(frozen=True)
class ProbeRequest:
    """Which ports of other nodes to try, all at once."""

    targets: Annotated[list[Target], Meta(max_length=16384)]


@dataclass(frozen=True)
class MeasureRequest:
    """To which port to send, and for how long."""

    target: Target
    seconds: Annotated[float, Meta(ge=0.001, le=2.0)]


class NodeServer:
    """One host; `serve` returns when the caller disconnects."""

    def __init__(
        self,
        source: FrameReader,
        target: int,
        settings: HostSettings,
        *,
        here: str | None = None,
    ) -> None:
        """`here`: this host's address on the connection to node 0; None over ssh."""
        self.source = source
        self.target = target
        self.settings = settings
        self.here = here
        """Over ssh the caller is the user. A caller at a TCP port must not choose which folders are
        read, make this host listen at other than its own addresses, or make it connect to its own
        ports."""
        self.ranks = RankProcesses()
        self.listeners: Listeners | None = None
        self._lock = threading.Lock()
        self._actions: dict[str, Callable[[Message], Any]] = {
            "begin": self._begin,
            "facts": lambda _: host_facts(self.settings),
            "names": lambda message: resolve_all(
                from_json(NamesRequest, message).names, limit_s=RESOLVE_S
            ),
            "listen": self._listen,
            "probe": self._probe,
            "measure": self._measure,
            "close": lambda _: self._close(),
            "collectives": self._collectives,
        }

    def serve(self) -> Message | None:
        """The caller's last frame; None when it disconnected without one.

        Every action has its own thread, so that heartbeats and the exit are answered while others
        run."""
        try:
            self._send("hello", protocol=PROTOCOL)
            while (message := self.source.next(SILENCE_S)) is not None:
                kind = message.get("kind")
                if kind == "end":
                    return message

                if kind == "heartbeat":
                    self._send("heartbeat", number=message.get("number"), now=time.time())
                    continue

                answering = threading.Thread(target=self._answer, args=[message], daemon=True)
                answering.start()

            return None
        finally:
            self.ranks.kill()
            self._close()

    def _answer(self, message: Message) -> None:
        """Run the action of a message in this thread, and send its result."""
        number = message.get("id")
        try:
            action = self._actions.get(str(message.get("kind")))
            if action is None:
                raise PreflightError(f"there is no action {message.get('kind')!r}")

            self._send("answer", id=number, ok=to_builtins(action(message)))
        except (DrumlineError, ValueError) as error:
            self._send("answer", id=number, error=getattr(error, "what", str(error)))
        except OSError as error:
            self._send("answer", id=number, error=f"{type(error).__name__}: {error}")

    def _send(self, kind: str, **content: Any) -> None:
        """One frame at a time, from any thread."""
        # Where the caller has disconnected, `serve` notices it as well.
        with self._lock, contextlib.suppress(OSError):
            write_all(self.target, self.source.session.encode({"kind": kind, **content}))

    # The actions

    def _begin(self, message: Message) -> Introduction:
        """Over ssh, use the caller's settings; return the identity and interfaces of this host."""
        if self.here is None:
            sent = from_json(HostSettings, message)
            merged = {**self.settings.environment, **sent.environment}
            self.settings = replace(sent, environment=merged)

        environment = self.settings.environment
        host_interfaces = interfaces()
        ssh = environment.get("SSH_CONNECTION", "").split()

        return Introduction(
            socket.gethostname(),
            [asdict(interface) for interface in host_interfaces],
            _as_json(gloo_interface(host_interfaces, environment)),
            _as_json(nccl_interface(host_interfaces, environment)),
            {name: environment[name] for name in environment if name.endswith("_SOCKET_IFNAME")},
            ssh[2] if len(ssh) == 4 else None,
        )

    def _listen(self, message: Message) -> OpenPorts:
        """The ports that were opened."""
        request = from_json(ListenRequest, message)
        for listened in (request.address, *request.other_addresses):
            self._check_own(listened)

        self._close()
        listeners = Listeners(bytes.fromhex(request.token), request.node)
        self.listeners = listeners
        opened = OpenPorts(
            [listeners.open(request.address) for _ in range(request.ports)],
            {address: listeners.open(address) for address in request.other_addresses},
        )

        if request.rendezvous_port is not None:
            try:
                opened.rendezvous_port = listeners.open(request.address, request.rendezvous_port)
            except OSError as error:
                opened.rendezvous_error = error.strerror or str(error)

        return opened

    def _close(self) -> None:
        """Close the ports of the check, if they are open."""
        if self.listeners is not None:
            self.listeners.close()

    def _probe(self, message: Message) -> list[JsonObject]:
        """The results of all targets, in their order."""
        targets = from_json(ProbeRequest, message).targets
        addresses = {target.address for target in targets}
        allowed = {address for address in addresses if self._is_elsewhere(address)}
        tried = [target for target in targets if target.address in allowed]
        results = dict(zip(tried, probe_all(tried, self._token()), strict=True))

        return [results.get(target, {"outcome": Reason.NO_ROUTE}) for target in targets]

    def _measure(self, message: Message) -> JsonObject:
        """The speed and the latency of one link."""
        request = from_json(MeasureRequest, message)
        self._check_elsewhere(request.target.address)
        return measure(request.target, self._token(), request.seconds)

    def _collectives(self, message: Message) -> list[JsonObject]:
        """Run the ranks of this host, and return what they print."""
        ranks = from_json(HostRanks, message)
        if ranks.first_rank == 0:  # it runs the store
            self._check_own(ranks.address)
        else:
            self._check_elsewhere(ranks.address)

        return self.ranks.run(ranks, self.settings.environment)

    # What node 0 may ask for

    def _check_own(self, address: str) -> None:
        """Refuse an address that is not one of this host."""
        if self.here is None:
            return

        own_addresses = [interface.address for interface in interfaces()]
        is_hidden = _is_loopback(address) and not _is_loopback(self.here)
        if address not in own_addresses or is_hidden:
            raise PreflightError(f"{address!r} is not an address of this host that others reach")

    def _check_elsewhere(self, address: str) -> None:
        """Refuse an address of this host."""
        if not self._is_elsewhere(address):
            raise PreflightError(f"{address!r} is not an address of another host")

    def _is_elsewhere(self, address: str) -> bool:
        """Whether this host may connect to it: not one of its own addresses, unless all nodes are
        on it."""
        if self.here is None or _is_loopback(self.here):
            return True

        try:
            parsed = ipaddress.ip_address(address)
        except ValueError:
            return False

        # ::ffff:127.0.0.1 leads to the loopback.
        parsed = getattr(parsed, "ipv4_mapped", None) or parsed
        is_special = (
            parsed.is_loopback
            or parsed.is_unspecified
            or parsed.is_multicast
            or parsed.is_link_local
        )

        own_addresses: set[str | None] = set()
        for interface in interfaces():
            own_addresses.update((interface.address, *interface.ipv6))

        return not is_special and str(parsed) not in own_addresses

    def _token(self) -> bytes:
        """What callers of this check prove that they belong to it with."""
        if self.listeners is None:
            raise PreflightError("this node does not listen yet")

        return self.listeners.token


def _is_loopback(address: str) -> bool:
    """Whether it is an address of the loopback; False for what is no address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _as_json(interface: Interface | None) -> JsonObject | None:
    """For the answer to `begin`; None: the library found no interface."""
    return None if interface is None else asdict(interface)


def main() -> None:
    """Over ssh: frames on stdin and stdout, to which nothing else may write."""
    target = os.dup(1)
    os.dup2(2, 1)

    try:
        NodeServer(FrameReader(0), target, HostSettings(own_variables())).serve()
    except FrameError as error:
        print_message(f"doctor: {error}")
        os._exit(2)

    # Threads may hang in the resolver or in a large file; their results are not needed any more.
    os._exit(0)


if __name__ == "__main__":
    main()

"""The doctor's program on each host: answers requests until its caller disconnects.

`python -m drumline.tools.doctor.pairs.node_server` is started over ssh, with frames on stdin and
stdout: that works when every other port is closed. `drumline doctor --node-rank K` runs the same
over a connection to node 0 (`without_ssh.py`). A frame names one of the fixed actions below, with
checked arguments; nothing that is received is executed. torch is not imported here, only in the
ranks of the collectives.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from drumline.base.errors import DrumlineError
from drumline.base.rank_environment import own_variables
from drumline.base.text import print_message
from drumline.net.dial import Reason
from drumline.net.frames import (
    WRONG_FIELD,
    FrameError,
    FrameReader,
    Message,
    read_field,
    read_list,
    write_all,
)
from drumline.net.interfaces import Interface, gloo_interface, interfaces, nccl_interface
from drumline.tools.doctor.machine.machine_facts import HostSettings, host_facts
from drumline.tools.doctor.pairs.probe import (
    TOKEN_BYTES,
    Listeners,
    Target,
    measure,
    probe_all,
    resolve_all,
)
from drumline.tools.doctor.ranks.rank_processes import HostRanks, RankProcesses

# The caller sends a message every few seconds. If none arrives, the network is broken, and sshd
# would keep us running for hours.
SILENCE_S = 30.0
MAX_NODES = 4096
MAX_TARGETS = 16384
MAX_DATA_PORTS = 8
MAX_OTHER_ADDRESSES = 16
PROTOCOL = 4
BACKENDS = ("auto", "gloo", "nccl")


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
        # Over ssh the caller is the user. A caller at a TCP port must not choose which folders are
        # read, make this host listen at other than its own addresses, or make it connect to its own
        # ports.
        self.here = here
        self.ranks = RankProcesses()
        self.listeners: Listeners | None = None
        self._lock = threading.Lock()
        self._actions: dict[str, Callable[[Message], Any]] = {
            "begin": self._begin,
            "facts": lambda _: host_facts(self.settings),
            "names": lambda message: resolve_all(read_list(message, "names", str, MAX_NODES)),
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
                else:
                    threading.Thread(
                        target=self._answer,
                        args=[message],
                        daemon=True,
                    ).start()

            return None
        finally:
            self.ranks.kill()
            self._close()

    def _answer(self, message: Message) -> None:
        """Run the action of a message in this thread, and send its result."""
        number = message.get("id")
        try:
            action = self._actions.get(read_field(message, "kind", str))
            if action is None:
                raise FrameError(WRONG_FIELD, f"there is no action {message['kind']!r}")

            self._send("answer", id=number, ok=action(message))
        except DrumlineError as error:
            self._send("answer", id=number, error=error.what)
        except (OSError, ValueError) as error:
            self._send("answer", id=number, error=f"{type(error).__name__}: {error}")

    def _send(self, kind: str, **content: Any) -> None:
        """One frame at a time, from any thread."""
        # Where the caller has disconnected, `serve` notices it as well.
        with self._lock, contextlib.suppress(OSError):
            write_all(self.target, self.source.session.encode({"kind": kind, **content}))

    # The actions

    def _begin(self, message: Message) -> dict[str, Any]:
        """Over ssh, use the caller's settings; return the identity and interfaces of this host."""
        if self.here is None:
            variables = read_field(message, "variables", dict)
            if not all(isinstance(value, str) for value in variables.values()):
                raise FrameError(WRONG_FIELD, "variables are not all strings")

            self.settings = HostSettings(
                environment={**self.settings.environment, **variables},
                run_folder=read_field(message, "run_folder", str),
                code=message.get("code") and read_field(message, "code", str),
                data=message.get("data") and read_field(message, "data", str),
            )

        environment = self.settings.environment
        host_interfaces = interfaces()
        ssh = environment.get("SSH_CONNECTION", "").split()
        return {
            "host": socket.gethostname(),
            "interfaces": [asdict(interface) for interface in host_interfaces],
            "gloo": _as_json(gloo_interface(host_interfaces, environment)),
            "nccl": _as_json(nccl_interface(host_interfaces, environment)),
            "variables": {
                name: environment[name] for name in environment if name.endswith("_SOCKET_IFNAME")
            },
            "reached_at": ssh[2] if len(ssh) == 4 else None,
        }

    def _listen(self, message: Message) -> dict[str, Any]:
        """Open high ports at the main address, one at every other address, and the rendezvous port
        if it is here."""
        token = bytes.fromhex(read_field(message, "token", str))
        if len(token) != TOKEN_BYTES:
            raise FrameError(WRONG_FIELD, f"token has {len(token)} bytes; {TOKEN_BYTES} are needed")

        address = read_field(message, "address", str)
        count = read_field(message, "ports", int, 1, MAX_DATA_PORTS)
        other_addresses = read_list(message, "others", str, MAX_OTHER_ADDRESSES)

        for listened in (address, *other_addresses):
            self._check_own(listened)

        listeners = Listeners(token, read_field(message, "node", int, 0, MAX_NODES))
        self._close()
        self.listeners = listeners
        opened: dict[str, Any] = {
            "data": [listeners.open(address) for _ in range(count)],
            "others": {
                other_address: listeners.open(other_address) for other_address in other_addresses
            },
        }
        if message.get("rendezvous_port") is not None:
            port = read_field(message, "rendezvous_port", int, 1, 65535)
            try:
                opened["rendezvous_port"] = listeners.open(address, port)
            except OSError as error:
                opened["rendezvous_error"] = error.strerror or str(error)

        return opened

    def _close(self) -> None:
        if self.listeners is not None:
            self.listeners.close()

    def _probe(self, message: Message) -> list[dict[str, Any]]:
        """The results of all targets, in their order."""
        targets = [_target(entry) for entry in read_list(message, "targets", dict, MAX_TARGETS)]
        addresses = {target.address for target in targets}
        allowed = {address for address in addresses if self._is_elsewhere(address)}
        tried = [target for target in targets if target.address in allowed]
        results = dict(zip(tried, probe_all(tried, self._token()), strict=True))
        return [results.get(target, {"outcome": Reason.NO_ROUTE}) for target in targets]

    def _measure(self, message: Message) -> dict[str, Any]:
        """The speed and the latency of one link."""
        seconds = read_field(message, "seconds", float, 0.001, 2.0)
        target = _target(read_field(message, "target", dict))
        self._check_elsewhere(target.address)
        return measure(target, self._token(), seconds)

    def _collectives(self, message: Message) -> list[dict[str, Any]]:
        """Run the ranks of this host, and return what they print."""
        ranks = HostRanks(
            first_rank=read_field(message, "first_rank", int, 0, 1 << 20),
            num_procs=read_field(message, "num_procs", int, 1, 1024),
            world_size=read_field(message, "world_size", int, 1, 1 << 20),
            address=read_field(message, "address", str),
            port=read_field(message, "port", int, 1, 65535),
            limit_s=read_field(message, "limit_s", float, 1.0, 600.0),
            backend=read_field(message, "backend", str),
        )
        if ranks.backend not in BACKENDS:
            raise FrameError(WRONG_FIELD, f"there is no backend {ranks.backend!r}")
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
        if address not in own_addresses or (_is_loopback(address) and not _is_loopback(self.here)):
            raise FrameError(
                WRONG_FIELD, f"{address!r} is not an address of this host that others reach"
            )

    def _check_elsewhere(self, address: str) -> None:
        """Refuse an address of this host."""
        if not self._is_elsewhere(address):
            raise FrameError(WRONG_FIELD, f"{address!r} is not an address of another host")

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
        own_addresses = {
            address
            for interface in interfaces()
            for address in (interface.address, *interface.ipv6)
        }
        return not (is_special or str(parsed) in own_addresses)

    def _token(self) -> bytes:
        if self.listeners is None:
            raise FrameError(WRONG_FIELD, "this node does not listen yet")
        return self.listeners.token


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _target(entry: Message) -> Target:
    """The target of a message, with checked fields."""
    return Target(
        node=read_field(entry, "node", int, 0, MAX_NODES),
        address=read_field(entry, "address", str),
        port=read_field(entry, "port", int, 1, 65535),
        large=read_field({"large": entry.get("large", False)}, "large", bool),
    )


def _as_json(interface: Interface | None) -> dict[str, Any] | None:
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

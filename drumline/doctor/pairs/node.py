"""The doctor's program on each host: does what the coordinator asks, and ends when it hears nothing more.

`python -m drumline.doctor.pairs.node` is started by ssh, which carries the messages on its own stdin and stdout: that
works when every other port is closed. `drumline doctor --node-rank K` runs the same over a connection to node 0
(joining.py). A message names one of the fixed actions below with arguments that are checked; nothing that is received
is executed. No torch here: the only thing that needs it runs in processes of its own (collectives/).
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drumline.doctor.collectives.rank_processes import HostRanks, RankProcesses
from drumline.doctor.machine.machine_facts import machine_facts
from drumline.doctor.pairs.listeners import TOKEN_BYTES, Listeners
from drumline.doctor.pairs.names import resolve_all
from drumline.doctor.pairs.probe import Target, probe_all
from drumline.doctor.pairs.speed import measure
from drumline.errors import DrumlineError
from drumline.launch.topology import own_variables
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
from drumline.terminal import print_message

# The coordinator speaks every few seconds, so a silence is a cut network: ssh's server would keep us for hours.
LEASE_S = 30.0
MOST_NODES = 4096
MOST_TARGETS = 16384
PORTS_PER_NODE = 8
HELLO = {"doctor": "drumline", "form": 1}
OPEN_PORTS_LIMIT = 16
BACKENDS = ("auto", "gloo", "nccl")


@dataclass(frozen=True)
class Subject:
    """What is examined on this host beside the network."""

    environment: Mapping[str, str]
    run_folder: str = "."
    code: str | None = None
    data: str | None = None


class Node:
    """One host under examination; `serve` returns when the coordinator goes away."""

    def __init__(
        self, source: FrameReader, target: int, subject: Subject, *, here: str | None = None
    ) -> None:
        """`here`: this host's address on the line to node 0; None over ssh."""
        self.source, self.target, self.subject = source, target, subject
        # Over ssh the caller is the user; whoever sits at a TCP port chooses neither which folders are read, nor where
        # this host listens beyond its own addresses, nor which of its own ports are tried.
        self.may_be_told, self.here = here is None, here
        self.ranks = RankProcesses()
        self.listeners: Listeners | None = None
        self._write = threading.Lock()
        self._actions: dict[str, Callable[[Message], Any]] = {
            "begin": self._begin,
            "clock": self._clock,
            "facts": self._facts,
            "names": self._names,
            "listen": self._listen,
            "probe": self._probe,
            "measure": self._measure,
            "close": self._close,
            "collectives": self._collectives,
        }

    def serve(self) -> Message | None:
        """Every action on a thread of its own: the clock is answered, and the end heard, while others are at work.

        What the coordinator said at the end; None when it went away without a word."""
        try:
            self._say(HELLO)
            while (message := self.source.next(LEASE_S)) is not None:
                if message.get("do") == "end":
                    return message
                threading.Thread(target=self._answer, args=[message], daemon=True).start()
            return None
        finally:
            self.ranks.kill()
            if self.listeners is not None:
                self.listeners.close()

    def _answer(self, message: Message) -> None:
        number = message.get("id")
        try:
            action = self._actions.get(read_field(message, "do", str))
            if action is None:
                raise FrameError(WRONG_FIELD, f"there is no action {message['do']!r}")
            self._say({"id": number, "ok": action(message)})
        except (DrumlineError, OSError, ValueError) as error:
            text = error.what if isinstance(error, DrumlineError) else f"{type(error).__name__}: {error}"
            self._say({"id": number, "error": text})

    def _say(self, message: Mapping[str, Any]) -> None:
        with self._write:
            try:
                write_all(self.target, self.source.session.encode(message))
            except OSError:
                # Nobody hears us any more; `serve` will find the same at its own end.
                return

    # The actions

    def _begin(self, message: Message) -> dict[str, Any]:
        """Take the settings of an examination over ssh; say who and where this is."""
        if self.may_be_told:
            told = read_field(message, "variables", dict)
            if not all(isinstance(value, str) for value in told.values()):
                raise FrameError(WRONG_FIELD, "variables are no texts")
            self.subject = Subject(
                environment={**self.subject.environment, **told},
                run_folder=read_field(message, "run_folder", str),
                code=_text_or_none(message, "code"),
                data=_text_or_none(message, "data"),
            )
        found = interfaces()
        environment = self.subject.environment
        return {
            "host": socket.gethostname(),
            "interfaces": [asdict(one) for one in found],
            "gloo": _as_json(gloo_interface(found, environment)),
            "nccl": _as_json(nccl_interface(found, environment)),
            "variables": {
                name: value for name, value in environment.items() if name.endswith("_SOCKET_IFNAME")
            },
            "reached_at": _reached_at(environment),
        }

    def _clock(self, _: Message) -> float:
        return time.time()

    def _facts(self, _: Message) -> dict[str, Any]:
        subject = self.subject
        return machine_facts(
            subject.environment,
            run_folder=Path(subject.run_folder),
            code=_path(subject.code),
            data=_path(subject.data),
        )

    def _names(self, message: Message) -> dict[str, Any]:
        return resolve_all(read_list(message, "names", str, MOST_NODES))

    def _listen(self, message: Message) -> dict[str, Any]:
        """High ports at the address that others use, one at every other, and the meeting place if it is here."""
        token = bytes.fromhex(read_field(message, "token", str))
        if len(token) != TOKEN_BYTES:
            raise FrameError(WRONG_FIELD, f"token has {len(token)} bytes; {TOKEN_BYTES} are needed")
        address = read_field(message, "address", str)
        count = read_field(message, "ports", int, 1, PORTS_PER_NODE)
        others = read_list(message, "others", str, OPEN_PORTS_LIMIT)
        for one in (address, *others):
            self._check_own(one)
        listeners = Listeners(token, read_field(message, "node", int, 0, MOST_NODES))
        if self.listeners is not None:
            self.listeners.close()
        self.listeners = listeners
        opened: dict[str, Any] = {
            "data": [listeners.open(address) for _ in range(count)],
            "others": {other: listeners.open(other) for other in others},
        }
        if message.get("meeting_port") is not None:
            port = read_field(message, "meeting_port", int, 1, 65535)
            try:
                opened["meeting_port"] = listeners.open(address, port)
            except OSError as error:
                opened["meeting_error"] = error.strerror or str(error)
        return opened

    def _probe(self, message: Message) -> list[dict[str, Any]]:
        targets = [_target(entry) for entry in read_list(message, "targets", dict, MOST_TARGETS)]
        outside = {address: self._is_outside(address) for address in {target.address for target in targets}}
        results = iter(probe_all([target for target in targets if outside[target.address]], self._token()))
        return [
            next(results) if outside[target.address] else {"outcome": "unreachable"} for target in targets
        ]

    def _measure(self, message: Message) -> dict[str, Any]:
        seconds = read_field(message, "seconds", float, 0.001, 2.0)
        target = _target(read_field(message, "target", dict))
        self._check_outside(target.address)
        return measure(target, self._token(), seconds)

    def _close(self, _: Message) -> None:
        if self.listeners is not None:
            self.listeners.close()

    def _collectives(self, message: Message) -> list[dict[str, Any]]:
        ranks = HostRanks(
            first_rank=read_field(message, "first_rank", int, 0, 1 << 20),
            num_procs=read_field(message, "num_procs", int, 1, 1024),
            world_size=read_field(message, "world_size", int, 1, 1 << 20),
            address=read_field(message, "address", str),
            port=read_field(message, "port", int, 1, 65535),
            limit_s=read_field(message, "patience_s", float, 1.0, 600.0),
            backend=read_field(message, "backend", str),
        )
        if ranks.backend not in BACKENDS:
            raise FrameError(WRONG_FIELD, f"there is no backend {ranks.backend!r}")
        if ranks.first_rank == 0:  # it keeps the store of all
            self._check_own(ranks.address)
        else:
            self._check_outside(ranks.address)
        return self.ranks.run(ranks, self.subject.environment)

    def _check_own(self, address: str) -> None:
        """Where node 0 tells this host to listen."""
        if self.here is None:
            return
        own = [one.address for one in interfaces()]
        if address not in own or (_is_loopback(address) and not _is_loopback(self.here)):
            raise FrameError(WRONG_FIELD, f"{address!r} is no address of this host that others reach")

    def _check_outside(self, address: str) -> None:
        if not self._is_outside(address):
            raise FrameError(WRONG_FIELD, f"{address!r} is no address of another host")

    def _is_outside(self, address: str) -> bool:
        """Whether node 0 may have that address tried: none of this host, unless all nodes are on it."""
        if self.here is None or _is_loopback(self.here):
            return True
        try:
            found = ipaddress.ip_address(address)
        except ValueError:
            return False
        found = getattr(found, "ipv4_mapped", None) or found  # ::ffff:127.0.0.1 leads to the loopback
        is_odd = found.is_loopback or found.is_unspecified or found.is_multicast or found.is_link_local
        own = {address for one in interfaces() for address in (one.address, *one.ipv6)}
        return not (is_odd or str(found) in own)

    def _token(self) -> bytes:
        if self.listeners is None:
            raise FrameError(WRONG_FIELD, "this node was not told to listen yet")
        return self.listeners.token


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _target(entry: Message) -> Target:
    return Target(
        node=read_field(entry, "node", int, 0, MOST_NODES),
        address=read_field(entry, "address", str),
        port=read_field(entry, "port", int, 1, 65535),
        large=read_field({"large": entry.get("large", False)}, "large", bool),
    )


def _text_or_none(message: Message, name: str) -> str | None:
    return None if message.get(name) is None else str(read_field(message, name, str))


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _as_json(one: Interface | None) -> dict[str, Any] | None:
    return None if one is None else asdict(one)


def _reached_at(environment: Mapping[str, str]) -> str | None:
    """The address by which ssh came to this host."""
    words = environment.get("SSH_CONNECTION", "").split()
    return words[2] if len(words) == 4 else None


def main() -> None:
    """Over ssh: messages on stdin and stdout, which nothing else may write to."""
    target = os.dup(1)
    os.dup2(2, 1)
    try:
        Node(FrameReader(0), target, Subject(own_variables())).serve()
    except FrameError as error:
        print_message(f"doctor's node: {error}")
        os._exit(2)
    # Threads may hang in the resolver or in a large file; whatever they do is of no use to anybody now.
    os._exit(0)


if __name__ == "__main__":
    main()

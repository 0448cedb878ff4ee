"""By hand, node 0's side: listens at the master's address for the others, and tells each who may not come why.

Only that address is listened on. Whoever connects must say which node it is, and prove that it knows the secret where
there is one.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable

from drumline.doctor.pairs.channel import Channel, NodeGoneError
from drumline.doctor.pairs.joining import HANDSHAKE_S, PURPOSE, Place
from drumline.doctor.pairs.node import MOST_NODES
from drumline.errors import PreflightError
from drumline.net.frames import MAX_BYTES, SEAL_BYTES, FrameError, Message, decode, encode
from drumline.net.handshake import MAX_STRANGER_BYTES, Agreed, RefusedError, answer
from drumline.net.interfaces import interfaces

SHOW_EVERY_S = 2.0


class Meeting:
    """Who has come so far."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.address = ""
        self.came: dict[int, Channel] = {}
        self.addresses: dict[int, str] = {}
        self.refused: dict[int, str] = {}
        self._coming: set[int] = set()
        self._all_here = asyncio.Event()

    async def wait(self, progress: Callable[[str], None]) -> None:
        """Until all nodes are here, or the time that they are given is over."""
        listener = listen(self.place)
        self.address = listener.getsockname()[0]
        server = await asyncio.start_server(self._greet, sock=listener, limit=MAX_BYTES + SEAL_BYTES + 1)
        try:
            left = self.place.wait_s
            while left > 0 and not self._all_here.is_set():
                missing = ", ".join(map(str, self.missing()))
                await asyncio.gather(*(channel.stay() for channel in self.came.values()))
                progress(
                    f"waiting for node {missing} at {self.address}:{self.place.port} ({left:.0f} s left)"
                )
                try:
                    await asyncio.wait_for(self._all_here.wait(), min(SHOW_EVERY_S, left))
                except TimeoutError:
                    left -= SHOW_EVERY_S
        finally:
            server.close()  # those who have come stay connected

    def missing(self) -> list[int]:
        return [number for number in range(1, self.place.nodes) if not self._is_here(number)]

    def _is_here(self, number: int) -> bool:
        """One that came and was ended may come again."""
        return number in self.came and not self.came[number].is_gone

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            number = await asyncio.wait_for(self._shake_hands(reader, writer), HANDSHAKE_S)
        except RefusedError as error:
            writer.write(encode({"refused": error.what, "next": error.next_step}) + b"\n")
            writer.close()
        except (TimeoutError, OSError, ValueError, FrameError, NodeGoneError):
            writer.close()  # nobody of ours
        else:
            self.addresses[number] = writer.get_extra_info("peername")[0]
            self.refused.pop(number, None)
            if not self.missing():
                self._all_here.set()

    async def _shake_hands(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        secret = None if self.place.secret is None else self.place.secret.encode()
        handshake = answer(secret, PURPOSE, 0, range(MOST_NODES), self._check)
        next(handshake)
        hello = decode((await reader.readline()).removesuffix(b"\n"), max_bytes=MAX_STRANGER_BYTES)
        try:
            writer.write(encode(handshake.send(hello) or {}) + b"\n")
            proof = decode((await reader.readline()).removesuffix(b"\n"), max_bytes=MAX_STRANGER_BYTES)
            handshake.send(proof)
        except StopIteration as done:
            await self._let_in(Channel(reader, writer), done.value)
        except RefusedError as error:
            if not self._is_here(hello["node"]):
                self.refused[hello["node"]] = error.what
            raise
        return int(hello["node"])

    async def _let_in(self, channel: Channel, agreed: Agreed) -> None:
        """It is here once it has said its first word: then its end is heard too."""
        number, channel.session = agreed.node, agreed.session
        self._coming.add(number)
        try:
            channel.writer.write(encode(agreed.last or {}) + b"\n")
            await channel.meet()
            if number in self.came:
                await self.came[number].close()  # of one that has left
            self.came[number] = channel
        finally:
            self._coming.discard(number)

    def _check(self, hello: Message) -> None:
        nodes, number = self.place.nodes, hello["node"]
        if hello.get("nodes") != nodes:
            raise RefusedError(
                f"it has --nodes {hello.get('nodes')}, node 0 has {nodes}",
                next_step="give the same --nodes everywhere",
            )
        if not 0 < number < nodes or number in self._coming or self._is_here(number):
            raise RefusedError(
                f"there is a node {number} already",
                next_step=f"give each node a --node-rank of its own, 0 to {nodes - 1}",
            )


def listen(place: Place) -> socket.socket:
    """A socket at the master's address, which must be one of this machine."""
    where = f"--master {place.master}"
    try:
        address = str(
            socket.getaddrinfo(place.master, place.port, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
        )
    except OSError as error:
        raise PreflightError(
            f"{where} does not resolve on {socket.gethostname()}: {error.strerror}",
            next_step="give the address of this machine that the others reach",
        ) from error
    _refuse_loopback(place, address)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, place.port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise _cannot_listen(place, address, error) from error
    return listener


def _refuse_loopback(place: Place, address: str) -> None:
    """Debian gives a host the address 127.0.1.1 in its own /etc/hosts, where nobody else can come to."""
    said_so = place.master == "localhost" or place.master.startswith("127.")
    if address.startswith("127.") and not said_so:
        raise PreflightError(
            f"--master {place.master} leads to {address} on {socket.gethostname()}, which no other host reaches",
            next_step=f"give the address instead: {_own_addresses()}",
        )


def _cannot_listen(place: Place, address: str, error: OSError) -> PreflightError:
    if error.errno == errno.EADDRNOTAVAIL:
        return PreflightError(
            f"--master {place.master} is {address}, which {socket.gethostname()} does not have",
            next_step=f"node 0 is the machine with that address; this one has {_own_addresses()}",
        )
    return PreflightError(
        f"node 0 cannot listen on {address}:{place.port}: {error.strerror}",
        next_step=f"ss -ltnp 'sport = :{place.port}' shows who has it; or give another: --master {place.master}:PORT",
    )


def _own_addresses() -> str:
    return ", ".join(one.address for one in interfaces() if one.address and not one.is_loopback) or "none"

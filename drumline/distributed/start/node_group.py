"""A group of nodes that train together, as their stores describe it, and whether one of them still answers."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

from drumline.net.sealed_store import document

CONNECT_S = 3.0
T = TypeVar("T")


@dataclass(frozen=True)
class LiveNode:
    number: int
    """As the launcher counts; it keeps it when it joins again."""
    host: str
    address: str
    port: int
    """Of its store."""
    process: str
    """Tells this start of its ranks from any other."""

    def __str__(self) -> str:
        return f"node {self.number} ({self.host})"


class Redirected(Exception):  # noqa: N818  # no error
    """The job that this rank would start runs already, without its node."""

    def __init__(self, text: bytes) -> None:
        super().__init__()
        self.text = text


class NodesChanged(BaseException):
    """Not an error: the group is left, and the next one continues from `kept`, what this rank has in memory."""

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.kept = kept


@dataclass(frozen=True)
class NodeGroup:
    """Who trains together, as the lowest of the nodes that were left decided; and the change since the group before."""

    generation: int
    members: tuple[LiveNode, ...]
    lost: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: bytes) -> NodeGroup | None:
        found = document(text, generation=int, members=list, lost=list, joined=list)
        if found is None:
            return None
        try:
            members = tuple(LiveNode(**one) for one in found["members"])
        except TypeError:
            return None
        return cls(found["generation"], members, tuple(found["lost"]), tuple(found["joined"]))


def probe(one: LiveNode) -> str:
    """Whether something listens there: `open`, or `refused` by its host. `silent`: the host is lost, or a network is
    cut; then the node may still train."""
    try:
        socket.create_connection((one.address, one.port), timeout=CONNECT_S).close()
    except ConnectionError:
        return "refused"
    except OSError:
        return "silent"
    return "open"


def answered(call: Callable[[], T], *, limit_s: float) -> T:
    """What it returns or raises; TimeoutError after the limit. A process that is stopped keeps its connections, and a
    call to its store would wait forever; it waits on in a thread."""
    found: SimpleQueue[tuple[T | None, Exception | None]] = SimpleQueue()

    def run() -> None:
        try:
            found.put((call(), None))
        except Exception as error:
            found.put((None, error))

    threading.Thread(target=run, name="drumline-ask", daemon=True).start()
    try:
        result, error = found.get(timeout=limit_s)
    except Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return cast("T", result)

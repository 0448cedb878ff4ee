"""Those who have connected and not yet proved who they are: so many at a time, and the newest always gets in.

A handshake between sidecars takes milliseconds, and a stranger who opens sockets and waits has the oldest ones: when
there are too many, the oldest is put out. Hosts of the run have room of their own each, so that strangers from
elsewhere do not even crowd them.
"""

from __future__ import annotations

from collections.abc import Collection

from drumline.watch.sidecar.line import Line

ROOM = 32
CROWDED = "was put out for a newer one"


class Porch:
    def __init__(self, known: Collection[str]) -> None:
        """`known`: the addresses of the run's hosts."""
        self._known = frozenset(known)
        self._waiting: dict[str, dict[Line, None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def enter(self, line: Line) -> None:
        waiting = self._waiting.setdefault(self._place(line), {})
        if len(waiting) >= ROOM:
            oldest = next(iter(waiting))
            self.leave(oldest)
            oldest.end(CROWDED, is_refused=True)
        waiting[line] = None

    def leave(self, line: Line) -> None:
        """It is known now, or gone; also of one that was never here."""
        self._waiting.get(self._place(line), {}).pop(line, None)

    def _place(self, line: Line) -> str:
        return line.address if line.address in self._known else ""

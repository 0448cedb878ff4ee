"""When is a sidecar done? When its ranks are, and all that is to be said of them was said.

A job may also be over before all its ranks were there; its folder may be gone, or another sidecar be in its place (a
second group in the same processes starts one of its own). Then there is nothing left to look at.
"""

from __future__ import annotations

import os
from pathlib import Path

from drumline.launch.node.watch_folder import SIDECAR
from drumline.watch.sidecar.chief import Chief
from drumline.watch.sidecar.node import Node

# After the ranks of this node are done: for those of other nodes, and for what is still to be said of a failure.
LINGER_S = 6.0


class Ending:
    """Of one sidecar; asked at every tick."""

    def __init__(self, folder: Path, node: Node, chief: Chief) -> None:
        self._place = folder / SIDECAR
        self._node, self._chief = node, chief
        self.is_told = False
        """By SIGTERM, which a launcher may send to all of a job's processes: first of all its ranks are to end."""
        self.has_lost_starter = False
        """The rank that started this process has ended, or is out of its loop."""
        self._over_since: float | None = None

    def is_due(self, now: float) -> bool:
        if not self._has_place() or (self.is_told and (self._chief.has_acted or self._never_began())):
            return True
        if not (self._node.is_over or self._never_began()):
            self._over_since = None
            return False
        if self._over_since is None:
            self._over_since = now
        return self._is_all_said() or now - self._over_since > LINGER_S

    def _has_place(self) -> bool:
        try:
            return self._place.read_text(encoding="utf-8") == str(os.getpid())
        except OSError:
            return False

    def _never_began(self) -> bool:
        return self.has_lost_starter and not self._node.has_begun

    def _is_all_said(self) -> bool:
        """Ranks that ended in order need no words; of others it must be said what happened."""
        return self._chief.has_acted or (self._node.ended_well and self._chief.has_nobody_left())

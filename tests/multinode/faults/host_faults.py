"""Faults of hosts and links: made when a rank signals that it is time, and repaired by a call."""

from __future__ import annotations

from pathlib import Path

from tests.multinode import firewall
from tests.multinode.faults.catalogue import Case
from tests.multinode.faults.inject import fired_at, note_fired
from tests.multinode.hosts import Testbed


class HostFault:
    """The fault of one case; call `poll` repeatedly."""

    def __init__(self, bed: Testbed, case: Case, folder: Path) -> None:
        self._bed = bed
        self._case = case
        self._folder = folder
        self._is_repaired = False

    def poll(self) -> None:
        if (
            self._case.fault.is_outside
            and (self._folder / "due").exists()
            and fired_at(self._folder) is None
        ):
            note_fired(self._folder, host=self._case.host)
            self._make()

    def _make(self) -> None:
        host = self._bed[self._case.host]
        if self._case.name == "cut":
            host.cut()
        elif self._case.name == "one_way":
            (other,) = (one for one in self._bed if one is not host)
            firewall.drop_from(host, other)
        elif self._case.name == "host_gone":
            host.power_off()

    def repair(self) -> None:
        """May be called twice."""
        if self._is_repaired or not self._case.fault.is_outside or fired_at(self._folder) is None:
            return
        self._is_repaired = True
        host = self._bed[self._case.host]
        if self._case.name == "cut":
            host.restore()
        elif self._case.name == "one_way":
            firewall.lift(host)
        elif self._case.name == "host_gone":
            host.power_on()

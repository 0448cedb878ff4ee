"""A rank under watch: it writes its beat, answers the sidecar, and the first of each node starts that.

One thread, which sleeps until there is something to do: a question on the rank's pipe, or the end of the sidecar.
Training needs neither: beats are stores to memory, and stacks are written by a signal's handler.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drumline.config.schema import WatchConfig
from drumline.launch.node.watch_folder import hold
from drumline.launch.rank_environment import watch_settings_from
from drumline.launch.topology import Topology, topology_from
from drumline.terminal import print_message
from drumline.watch.beats.phase import Phase
from drumline.watch.beats.record import BeatWriter
from drumline.watch.rank.beside import Beside
from drumline.watch.rank.flight import answer
from drumline.watch.rank.met import Met, met_by_launcher
from drumline.watch.rank.stacks import answer_on_this_thread, register_stacks
from drumline.watch.sidecar.terms import Terms

if TYPE_CHECKING:
    from drumline.launch.node.sealed_store import SealedStore

# How long the end of a rank waits for an answer that is being written.
ANSWER_S = 5.0


class Attendance:
    """From `__init__` to `close`."""

    def __init__(self, met: Met, *, rank: int, terms: Terms) -> None:
        """`terms`: for the sidecar, which the first rank of a node starts."""
        self.folder = met.folder
        self.rank = rank
        self.patience_s = terms.hang_s
        """How long the watchdog waits for what may be innocent; None: for ever."""
        # Of a folder that a launcher has made, that one sees to it.
        self._hold = hold(self.folder) if terms.owns_folder and met.is_first else None
        # Of an earlier group in this very process.
        for kind in ("beat", "stacks", "ask", "notes", "activity"):
            self.file(kind).unlink(missing_ok=True)
        self.beat = BeatWriter(self.file("beat"), rank=rank)
        register_stacks(self.file("stacks"))
        os.mkfifo(self.file("ask"), 0o600)
        # For reading and writing: a pipe without a writer would be at its end, again and again.
        self._questions = os.open(self.file("ask"), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._wake_up, self._waker = os.pipe2(os.O_CLOEXEC)
        self._sidecar = Beside(terms, met.listener)
        if met.is_first:
            self._sidecar.start()
        self._owner = os.getpid()
        self._thread = threading.Thread(target=self._attend, name="drumline-watch", daemon=True)
        self._thread.start()
        atexit.register(self._end_with_python)

    def close(self) -> None:
        """The rank is out of its loop; the sidecar sees that by itself."""
        if os.getpid() != self._owner:
            return
        atexit.unregister(self._end_with_python)
        os.write(self._waker, b"\0")
        self._thread.join(ANSWER_S)
        if self._thread.is_alive():  # in a library's lock, for an answer; it is not waited for
            return
        for descriptor in (self._questions, self._wake_up, self._waker):
            os.close(descriptor)
        if self._hold is not None:
            os.close(self._hold)
        self._sidecar.close()

    def fail(self, error: str) -> None:
        """The rank's last heartbeat; and its collectives, for a sidecar that comes to ask when it has ended."""
        self.beat.fail(error)
        with contextlib.suppress(OSError):
            os.write(self._questions, b"\0")  # answered by the thread: torch's recorder may keep it waiting

    def _end_with_python(self) -> None:
        """A program that ends without a word to us: with the error that Python has just shown, if there was one."""
        error = getattr(sys, "last_value", None)
        if error is None:
            self.beat.mark(Phase.LEFT)
        else:
            self.beat.fail(f"{type(error).__name__}: {error}".rstrip(": "))

    def file(self, kind: str) -> Path:
        return self.folder / f"rank-{self.rank:05d}.{kind}"

    def _attend(self) -> None:
        answer_on_this_thread()
        while True:
            sidecar = self._sidecar.fileno()
            watched = [self._questions, self._wake_up] + ([] if sidecar is None else [sidecar])
            ready = select.select(watched, [], [])[0]
            if self._wake_up in ready:
                return
            if self._questions in ready:
                self._answer()
            if sidecar in ready and not self._start_next_sidecar():
                return

    def _answer(self) -> None:
        with contextlib.suppress(OSError):
            # The last question: earlier ones were given up.
            answer(self.folder, self.rank, os.read(self._questions, 4096)[-1])

    def _start_next_sidecar(self) -> bool:
        """False: there is no time for it, the rank leaves."""
        wait_s = self._sidecar.bury()
        if wait_s is None:
            return True
        if select.select([self._wake_up], [], [], wait_s)[0]:
            return False
        self._sidecar.start()
        return True


def attend(
    store: SealedStore | None,
    topology: Topology,
    watch: WatchConfig,
    *,
    run: Path | None,
    timeout_s: float,
    environment: Mapping[str, str],
) -> Attendance | None:
    """Collective over all ranks of a job, which meet in its store; without one, there is a single rank. None: this rank
    cannot be watched, which was said."""
    from drumline.watch.rank.meeting import meet

    told = watch_settings_from(environment)
    met = meet(
        store,
        topology=topology,
        folder=told.folder,
        environment=environment,
        timeout_s=timeout_s,
    )
    terms = Terms(
        **_of_node(met, topology, owns_folder=told.folder is None),
        run=None if run is None else str(run.absolute()),
        on_hang=watch.on_hang,
        hang_s=watch.hang_s,
        slow_factor=watch.slow_factor,
    )
    return _begin(met, topology, terms)


def attend_script(environment: Mapping[str, str]) -> Attendance | None:
    """For a script that knows nothing of the watch: its launcher has said who is where. None: nobody has."""
    told, topology = watch_settings_from(environment), topology_from(environment)
    if told.folder is None or topology is None:
        return None
    met = met_by_launcher(told, topology, node=int(environment.get("GROUP_RANK", "0")))
    terms = Terms(
        **_of_node(met, topology, owns_folder=False),
        run=None if told.run is None else str(told.run.absolute()),
        on_hang=told.on_hang,
        hang_s=told.hang_s,
    )
    return _begin(met, topology, terms)


def _begin(met: Met, topology: Topology, terms: Terms) -> Attendance | None:
    try:
        return Attendance(met, rank=topology.rank, terms=terms)
    except OSError as error:  # the watch is no reason not to train
        print_message(
            f"rank {topology.rank} on {topology.host} is not watched: {error}. Next: free some space there"
        )
        return None


def _of_node(met: Met, topology: Topology, *, owns_folder: bool) -> dict[str, Any]:
    return {
        "folder": str(met.folder),
        "owns_folder": owns_folder,
        "node": met.node,
        "host": topology.host,
        "ranks": met.ranks,
        "world_size": topology.world_size,
        "secret": met.secret,
        "peers": met.peers,
        "listener": None if met.listener is None else met.listener.fileno(),
    }

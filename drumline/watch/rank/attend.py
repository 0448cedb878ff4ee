"""A rank under watch: it writes its beat, answers the sidecar, and the first of each node starts that.

One thread, which sleeps until there is something to do: a question on the rank's pipe, or the end of the sidecar.
Training needs neither: beats are stores to memory, and stacks are written by a signal's handler.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drumline.config.schema import WatchConfig
from drumline.launch.topology import Topology, topology_from
from drumline.launch.watch_terms import watch_terms_from
from drumline.watch.beats.record import BeatWriter
from drumline.watch.rank.flight import answer
from drumline.watch.rank.met import Met, met_by_launcher
from drumline.watch.rank.stacks import answer_on_this_thread, register_stacks
from drumline.watch.sidecar.terms import Terms

if TYPE_CHECKING:
    import torch.distributed as dist

# A sidecar that cannot live here is given up.
MAX_STARTS = 5
BACK_OFF_S = 1.0


class Attendance:
    """From `__init__` to `close`."""

    def __init__(self, met: Met, *, rank: int, terms: Terms) -> None:
        """`terms`: for the sidecar, which the first rank of a node starts."""
        self.folder = met.folder
        self.rank = rank
        for kind in ("beat", "stacks", "ask"):  # of an earlier group in this very process
            self._file(kind).unlink(missing_ok=True)
        self.beat = BeatWriter(self._file("beat"), rank=rank)
        register_stacks(self._file("stacks"))
        os.mkfifo(self._file("ask"), 0o600)
        # For reading and writing: a pipe without a writer would be at its end, again and again.
        self._questions = os.open(self._file("ask"), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._wake_up, self._waker = os.pipe2(os.O_CLOEXEC)
        self._terms = terms
        self._listener = met.listener
        self._sidecar: subprocess.Popen[bytes] | None = None
        self._num_starts = 0
        if met.is_first:
            self._start_sidecar()
        self._owner = os.getpid()
        self._thread = threading.Thread(target=self._attend, name="drumline-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The rank is out of its loop; the sidecar sees that by itself."""
        if os.getpid() != self._owner:
            return
        os.write(self._waker, b"\0")
        self._thread.join()
        for descriptor in (self._questions, self._wake_up, self._waker):
            os.close(descriptor)
        if self._sidecar is not None and self._sidecar.stdin is not None:
            with contextlib.suppress(OSError):
                self._sidecar.stdin.close()
        if self._listener is not None:
            self._listener.close()

    def _file(self, kind: str) -> Path:
        return self.folder / f"rank-{self.rank:05d}.{kind}"

    def _attend(self) -> None:
        answer_on_this_thread()
        while True:
            watched = [self._questions, self._wake_up]
            if self._sidecar is not None and self._sidecar.stdout is not None:
                watched.append(self._sidecar.stdout.fileno())
            ready = select.select(watched, [], [])[0]
            if self._wake_up in ready:
                return
            if self._questions in ready:
                with contextlib.suppress(OSError):
                    answer(
                        self.folder, self.rank, os.read(self._questions, 4096)[-1]
                    )  # earlier ones were given up
            if watched[2:] and watched[2] in ready:
                self._bury_sidecar()

    def _start_sidecar(self) -> None:
        self._num_starts += 1
        passed = [] if self._listener is None else [self._listener.fileno()]
        self._sidecar = subprocess.Popen(
            [sys.executable, "-m", "drumline.watch.sidecar.main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,  # says nothing: its end is the sidecar's
            pass_fds=passed,
            # Not in the way of Ctrl-C, and of a launcher that ends the rank's group.
            start_new_session=True,
        )
        assert self._sidecar.stdin is not None
        with contextlib.suppress(OSError):
            self._sidecar.stdin.write(self._terms.to_json().encode() + b"\n")
            self._sidecar.stdin.flush()

    def _bury_sidecar(self) -> None:
        """It has ended: by its own will when all ranks of the node were done, otherwise there is a next one."""
        assert self._sidecar is not None
        code, self._sidecar = self._sidecar.wait(), None
        if code == 0:
            return
        if self._num_starts >= MAX_STARTS:
            message = (
                f"drumline: the watch's sidecar on {self._terms.host} has ended {MAX_STARTS} times ({code}); "
            )
            print(f"{message}the run goes on without", file=sys.stderr, flush=True)
            return
        if select.select([self._wake_up], [], [], BACK_OFF_S * (self._num_starts - 1))[0]:
            return
        with contextlib.suppress(OSError):
            self._start_sidecar()


def attend(
    store: dist.Store | None,
    topology: Topology,
    watch: WatchConfig,
    *,
    run: Path | None,
    timeout_s: float,
    environment: Mapping[str, str],
) -> Attendance:
    """Collective over all ranks of a job, which meet in its store; without one, there is a single rank."""
    from drumline.watch.rank.meeting import meet

    told = watch_terms_from(environment)
    met = meet(
        store,
        topology=topology,
        folder=told.folder,
        secret=told.secret,
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
    return Attendance(met, rank=topology.rank, terms=terms)


def attend_script(environment: Mapping[str, str]) -> Attendance | None:
    """For a script that knows nothing of the watch: its launcher has said who is where. None: nobody has."""
    told, topology = watch_terms_from(environment), topology_from(environment)
    if told.folder is None or topology is None:
        return None
    met = met_by_launcher(told, topology, node=int(environment.get("GROUP_RANK", "0")))
    terms = Terms(
        **_of_node(met, topology, owns_folder=False),
        run=None if told.run is None else str(told.run.absolute()),
        on_hang=told.on_hang,
        hang_s=told.hang_s,
    )
    return Attendance(met, rank=topology.rank, terms=terms)


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

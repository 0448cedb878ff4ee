"""A rank with the watchdog writes its heartbeat and answers the sidecar, which the first rank of
each node starts."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import drumline
from drumline.base.rank_environment import WITHOUT_WATCH, topology_from, watch_settings_from
from drumline.base.text import print_message
from drumline.rank.watched.node_watch import options_from_launcher
from drumline.watch.failure_kind import FailureKind, failure_kind
from drumline.watch.heartbeat import HeartbeatWriter, Phase
from drumline.watch.self_report import (
    latest_collectives,
    main_thread_frames,
    name_answering_thread,
    register_stack_signals,
    write_report,
)
from drumline.watch.sidecar.sidecar_options import SidecarOptions
from drumline.watch.watch_folder import hold

# How long the end of a rank waits for an answer that is being written.
ANSWER_S = 5.0
FILES = ("heartbeat", "stacks", "ask", "script", "activity")

# A sidecar that cannot live here is given up.
MAX_STARTS = 5

# The very package that the rank runs, wherever that was found. Not `-m`, which looks in the current
# folder first: a user's own queue.py there would be the sidecar's too.
PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv.pop()); import drumline; del sys.path[0]; "
    "from drumline.watch.sidecar.main import main; main()"
)


class WatchedRank:
    """One thread sleeps until the sidecar asks or exits; training does not need it: heartbeats are
    stores to memory."""

    def __init__(self, options: SidecarOptions, rank: int) -> None:
        """`options`: for the sidecar, which the first rank of a node starts."""
        self.folder = Path(options.folder)
        self.rank = rank
        is_first = rank == options.ranks[0]
        self.patience_s = options.hang_s
        """How long the watchdog waits for what may be harmless; None: for ever."""

        # A launcher holds the folder that it has made.
        self._hold = hold(self.folder) if options.owns_folder and is_first else None

        # Of an earlier group in this very process.
        for kind in FILES:
            self.file(kind).unlink(missing_ok=True)

        self.heartbeat = HeartbeatWriter(self.file("heartbeat"), rank=rank)
        register_stack_signals(self.file("stacks"))
        os.mkfifo(self.file("ask"), 0o600)

        # For reading and writing: a pipe without a writer would be at its end, again and again.
        self._questions = os.open(self.file("ask"), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._wake_up, self._waker = os.pipe2(os.O_CLOEXEC)
        self._sidecar = SidecarProcess(options)
        if is_first:
            self._sidecar.start()

        self._owner = os.getpid()
        self._thread = threading.Thread(target=self._serve, name="drumline-watch", daemon=True)
        self._thread.start()
        atexit.register(self._end_with_python)

    def close(self) -> None:
        """The rank is out of its loop; the sidecar sees that by itself."""
        if os.getpid() != self._owner:
            return

        atexit.unregister(self._end_with_python)
        os.write(self._waker, b"\0")
        self._thread.join(ANSWER_S)

        if self._thread.is_alive():  # blocked in a library's lock, for an answer
            return

        for descriptor in (self._questions, self._wake_up, self._waker):
            os.close(descriptor)

        if self._hold is not None:
            os.close(self._hold)

        self._sidecar.close()

    def fail(self, error: str, kind: FailureKind) -> None:
        """The rank's last heartbeat; and its collectives, for a sidecar that asks when it has
        exited."""
        self.heartbeat.fail(error, kind)
        with contextlib.suppress(OSError):
            # answered by the thread: torch's recorder may block
            os.write(self._questions, b"\0")

    def file(self, kind: str) -> Path:
        """One of `FILES`, of this rank."""
        return self.folder / f"rank-{self.rank:05d}.{kind}"

    def _end_with_python(self) -> None:
        """A program that exits without `close`: with the error that Python has just shown, if there
        was one."""
        error = getattr(sys, "last_value", None)
        if error is None:
            self.heartbeat.mark(Phase.LEFT)
        else:
            text = f"{type(error).__name__}: {error}".rstrip(": ")
            self.heartbeat.fail(text, failure_kind(error))

    def _serve(self) -> None:
        """The thread: answers questions, and starts the sidecar again."""
        name_answering_thread()
        while True:
            sidecar = self._sidecar.fileno()
            watched = [self._questions, self._wake_up] + ([] if sidecar is None else [sidecar])

            ready = select.select(watched, [], [])[0]
            if self._wake_up in ready:
                return

            if self._questions in ready:
                with contextlib.suppress(OSError):
                    # The last question: nobody waits for earlier ones.
                    question = os.read(self._questions, 4096)[-1]
                    write_report(self.folder, self.rank, question, torch_report)

            if sidecar in ready and self._sidecar.reap():
                self._sidecar.start()


def torch_report() -> dict[str, Any]:
    """The DataLoader workers that the main thread waits for, and the latest collectives; nothing
    where torch is not loaded, as in a script that does not use it."""
    # Nothing is imported here: the main thread may be blocked in an import, and this thread would
    # wait for it.
    dist = sys.modules.get("torch.distributed")
    internals = sys.modules.get("drumline.rank.torch_internals")
    if dist is None or internals is None:
        return {}

    report: dict[str, Any] = {"workers": internals.awaited_workers(main_thread_frames())}
    if dist.is_available() and dist.is_initialized():
        report["collectives"] = latest_collectives(internals.recorded_collectives())

    return report


def watch_script(environment: Mapping[str, str]) -> WatchedRank | None:
    """For a script that knows nothing of the watchdog: its launcher says which node is where. None:
    it does not."""
    settings = watch_settings_from(environment)
    topology = topology_from(environment)
    if settings.folder is None or topology is None:
        return None

    node = int(environment.get("GROUP_RANK", "0"))
    options = options_from_launcher(settings, topology, node=node)
    return watch_rank(options, topology.rank)


def watch_rank(options: SidecarOptions, rank: int) -> WatchedRank | None:
    """None: it cannot be watched, which is reported."""
    try:
        return WatchedRank(options, rank)
    except OSError as error:  # the watchdog is no reason not to train
        if options.listener is not None:
            os.close(options.listener)
        print_message(
            f"rank {rank} on {options.host} is not watched: {error}. Try: free some space there"
        )
        return None


@dataclass(eq=False)
class SidecarProcess:
    """Starts the sidecar, and again when it has died. Nothing that happens to it may fail the rank:
    one that cannot be started is reported once, and training continues without."""

    options: SidecarOptions
    _process: subprocess.Popen[bytes] | None = None
    _num_starts: int = 0

    def fileno(self) -> int | None:
        """Becomes readable when the sidecar exits. None: there is none."""
        return self._process.stdout.fileno() if self._process and self._process.stdout else None

    def start(self) -> None:
        """Start the sidecar, and send it its options."""
        self._num_starts += 1
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", PROGRAM, str(Path(drumline.__path__[0]).parent)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[] if self.options.listener is None else [self.options.listener],
                # Out of reach of Ctrl-C, and of a launcher that ends the rank's process group.
                start_new_session=True,
            )
        except OSError as error:
            self._warn(f"cannot be started ({error.strerror})")
            return

        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(asdict(self.options)).encode() + b"\n")
            self._process.stdin.flush()

    def reap(self) -> bool:
        """After its exit: whether to start it again. False: its ranks are done, or it is given
        up."""
        assert self._process is not None
        code = self._process.wait()
        self._close_pipes()
        self._process = None

        if code == 0:
            return False
        if self._num_starts >= MAX_STARTS:
            self._warn(f"exited {MAX_STARTS} times (exit code {code})")
            return False

        return True

    def close(self) -> None:
        """This rank is out of its loop, which the sidecar sees by itself; a thread reaps it."""
        if self._process is not None:
            self._close_pipes()
            threading.Thread(target=self._process.wait, name="drumline-reap", daemon=True).start()
        if self.options.listener is not None:
            os.close(self.options.listener)

    def _close_pipes(self) -> None:
        """The sidecar sees that this rank does not hold them any more."""
        assert self._process is not None
        for stream in filter(None, (self._process.stdin, self._process.stdout)):
            with contextlib.suppress(OSError):
                stream.close()

    def _warn(self, what: str) -> None:
        """Report once that this node has no sidecar."""
        print_message(
            f"the watchdog's sidecar on {self.options.host} {what}; training continues, but hangs are not "
            f"diagnosed. Try: read what is above this line; or train without the watchdog: {WITHOUT_WATCH}"
        )

"""The sidecar process, as the rank that starts it sees it. Nothing that happens to it may fail the rank: a sidecar that
cannot be started is reported once, and training continues without."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import drumline
from drumline.launch.rank_environment import WITHOUT_WATCH
from drumline.terminal import print_message
from drumline.watch.sidecar.sidecar_options import SidecarOptions

# One that cannot live here is given up; one that lived for long can.
MAX_STARTS = 5
LONG_S = 600.0
BACK_OFF_S = 1.0
# The very package that the rank runs, wherever that was found. Not `-m`, which looks in the current folder first: a
# user's own queue.py there would be the sidecar's too.
PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv.pop()); import drumline; del sys.path[0]; "
    "from drumline.watch.sidecar.main import main; main()"
)


class SidecarProcess:
    """Starts it, and again when it has died."""

    def __init__(self, options: SidecarOptions, listener: socket.socket | None) -> None:
        self._options, self._listener = options, listener
        self._process: subprocess.Popen[bytes] | None = None
        self._num_starts = 0
        self._started_at = 0.0

    def fileno(self) -> int | None:
        """Becomes readable when the sidecar exits. None: there is none."""
        return self._process.stdout.fileno() if self._process and self._process.stdout else None

    def start(self) -> None:
        self._num_starts += 1
        self._started_at = time.monotonic()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", PROGRAM, str(Path(drumline.__path__[0]).parent)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[] if self._listener is None else [self._listener.fileno()],
                # Out of reach of Ctrl-C, and of a launcher that ends the rank's process group.
                start_new_session=True,
            )
        except OSError as error:
            self._warn(f"cannot be started ({error.strerror})")
            return
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(asdict(self._options)).encode() + b"\n")
            self._process.stdin.flush()

    def reap(self) -> float | None:
        """After its exit: in how many seconds to start it again. None: it was done with all ranks of the node, or is
        given up."""
        assert self._process is not None
        code = self._process.wait()
        self._close_pipes()
        self._process = None
        if code == 0:
            return None
        if time.monotonic() - self._started_at > LONG_S:
            self._num_starts = 1
        if self._num_starts >= MAX_STARTS:
            self._warn(f"exited {MAX_STARTS} times (exit code {code})")
            return None
        return BACK_OFF_S * (self._num_starts - 1)

    def close(self) -> None:
        """This rank is out of its loop, which the sidecar sees by itself; a thread reaps it."""
        if self._process is not None:
            self._close_pipes()
            threading.Thread(target=self._process.wait, name="drumline-reap", daemon=True).start()
        if self._listener is not None:
            self._listener.close()

    def _close_pipes(self) -> None:
        assert self._process is not None
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _warn(self, what: str) -> None:
        print_message(
            f"the watchdog's sidecar on {self._options.host} {what}; training continues, but hangs are not "
            f"diagnosed. Next: see what is above this line; or train without the watchdog: {WITHOUT_WATCH}"
        )

"""A node's ranks of the collectives phase: processes of our own module, each says one line, and all are ended. Should
this process be killed, a guard beside it ends them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from drumline.launch.node import guard

PROGRAM = ("-m", "drumline.doctor.collectives.rank")
PHASE_LIMIT_S = 15.0
# For the others to say whom they wait for, once the first has ended in trouble.
AFTER_TROUBLE_S = 12.0
MOST_BYTES = 1 << 18
POLL_S = 0.05
LAST_WORDS = 600


@dataclass(frozen=True)
class Share:
    """Which ranks of the group are this node's, and where all meet."""

    first_rank: int
    num_procs: int
    world_size: int
    address: str
    port: int
    limit_s: float
    backend: str = "auto"
    phase_limit_s: float = PHASE_LIMIT_S
    """How long ranks wait for each other in one collective, before they say whom they wait for."""
    program: tuple[str, ...] = ()
    """Of Python; another than our own only in tests."""

    def command(self) -> list[str]:
        words = [sys.executable, *(self.program or PROGRAM)]
        return [*words, "--backend", self.backend, "--limit-s", str(self.phase_limit_s)]

    def variables(self, local_rank: int) -> dict[str, str]:
        """What torchrun would give the rank."""
        return {
            "RANK": str(self.first_rank + local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.num_procs),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            # Of its own: what a launcher may have set belongs to another group.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "OMP_NUM_THREADS": "1",
        }


class Ranks:
    """The processes of one share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: list[subprocess.Popen[bytes]] = []
        self._is_over = False

    def run(self, share: Share, environment: Mapping[str, str]) -> list[dict[str, Any]]:
        """What each rank said, or how it ended without a word; none is left when this returns."""
        job = guard.new_job()
        watcher = guard.Guard(job, 0)
        outputs = [(tempfile.TemporaryFile(), tempfile.TemporaryFile()) for _ in range(share.num_procs)]  # noqa: SIM115
        try:
            for number, (out, err) in enumerate(outputs):
                self._start(
                    share.command(), {**environment, **share.variables(number), guard.VARIABLE: job}, out, err
                )
            self._wait(share, [out for out, _ in outputs])
            # Those that still run have hung; the line tells that by having no exit code.
            codes = [process.poll() for process in self._running]
            self.end()
            return [
                {"rank": share.first_rank + number, **_said(code, out, err, share.limit_s)}
                for number, (code, (out, err)) in enumerate(zip(codes, outputs, strict=True))
            ]
        finally:
            self.end()
            watcher.close(in_order=True)
            for file in (file for pair in outputs for file in pair):
                file.close()

    def end(self) -> None:
        """Kill what runs, and let nothing start any more."""
        with self._lock:
            self._is_over = True
            for process in self._running:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()

    def _start(
        self, command: Sequence[str], environment: Mapping[str, str], out: IO[bytes], err: IO[bytes]
    ) -> None:
        with self._lock:
            if self._is_over:
                return
            self._running.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
            )

    def _wait(self, share: Share, outputs: Sequence[IO[bytes]]) -> None:
        """Until all have ended, or time is up. After the first that failed, only for those that nobody has blamed."""
        deadline, seen_trouble = time.monotonic() + share.limit_s, False
        while time.monotonic() < deadline:
            codes = [process.poll() for process in self._running]
            awaited = [share.first_rank + number for number, code in enumerate(codes) if code is None]
            if any(codes):
                if not seen_trouble:
                    seen_trouble = True
                    deadline = min(deadline, time.monotonic() + share.phase_limit_s + AFTER_TROUBLE_S)
                # Of those that have ended alone: one that still writes shares its place in the file with us.
                told = "".join(
                    _text(outputs[number]) for number, code in enumerate(codes) if code is not None
                )
                awaited = [rank for rank in awaited if f"rank {rank} on" not in told]
            if not awaited:
                return
            time.sleep(POLL_S)


def read_result(text: str) -> dict[str, Any] | None:
    """A rank's line, among whatever else NCCL and torch have printed."""
    for line in reversed(text.splitlines()):
        try:
            result = json.loads(line)
        except ValueError:
            continue
        if isinstance(result, dict) and "findings" in result:
            return result
    return None


def _text(out: IO[bytes]) -> str:
    out.seek(0)
    return out.read(MOST_BYTES).decode(errors="replace")


def _said(code: int | None, out: IO[bytes], err: IO[bytes], limit_s: float) -> dict[str, Any]:
    if (result := read_result(_text(out))) is not None:
        return {"code": code, "result": result}
    return {"code": code, "result": None, "error": f"{_end(code, limit_s)}{_last_words(err)}"}


def _end(code: int | None, limit_s: float) -> str:
    if code is None:
        return f"it had not ended after {limit_s:g} s"
    return f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with code {code}"


def _last_words(err: IO[bytes]) -> str:
    err.seek(0, os.SEEK_END)
    err.seek(max(0, err.tell() - 4 * LAST_WORDS))
    lines = [line for line in err.read().decode(errors="replace").splitlines() if line.strip()]
    return f": {lines[-1].strip()[:LAST_WORDS]}" if lines else ""

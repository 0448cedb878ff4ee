"""A rank that its launcher ends, since another one failed, first finishes the checkpoint that it is
writing."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

from drumline.training.between_steps import preemption as preempting
from drumline.training.between_steps.preemption import SignalPipe, StopRequestWatcher
from tests.ranks import server_context


def end_while_writing(written: Path, *, is_signalled_again: bool) -> None:
    """Exits when the file exists; otherwise only at a second signal."""
    preempting.SAME_SIGNAL_S = -1.0
    preempting.MAX_WAIT_FOR_SAVE_S = 1e6
    watcher = StopRequestWatcher()
    watcher.pipe = SignalPipe(preempting.SIGNALS)
    watcher.first_signal = signal.SIGTERM
    watcher.received_at = time.monotonic()
    watcher.is_writing = lambda: not written.exists()
    threading.Timer(
        0.2, written.touch if not is_signalled_again else lambda: os.kill(os.getpid(), 15)
    ).start()
    watcher._exit(42)


def exit_code(written: Path, *, is_signalled_again: bool) -> int | None:
    process = server_context.Process(
        target=end_while_writing, args=(written,), kwargs={"is_signalled_again": is_signalled_again}
    )
    process.start()
    process.join(30)
    code = process.exitcode
    process.kill()
    process.join()
    process.close()
    return code


def test_it_ends_when_the_checkpoint_is_complete(tmp_path: Path) -> None:
    assert exit_code(tmp_path / "written", is_signalled_again=False) == 42
    assert (tmp_path / "written").exists()


def test_told_again_it_ends_at_once(tmp_path: Path) -> None:
    assert exit_code(tmp_path / "written", is_signalled_again=True) == 128 + signal.SIGTERM
    assert not (tmp_path / "written").exists()

"""How a rank shows its Python stacks: by itself when it is asked, or to a signal, by C code that needs neither Python's
lock nor a thread of ours.

The signal is for a rank that does not answer, where Python stands still: the C code reads the stacks of other threads
as they are, and a thread that ran meanwhile would pull its stack away from under it, which ends the process.

Workers that it forks inherit the handler and the open file: who asks several processes asks one after the other. They
have a signal of their own, whose handler they register when they leave `fork`: the rank's handler would end a process
that is still in there.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from pathlib import Path

# SIGUSR1 and SIGTERM mean preemption; the first real-time signals are used by C libraries and profilers.
STACK_SIGNAL = signal.SIGRTMIN + 7
WORKER_SIGNAL = signal.SIGRTMIN + 8
ANSWERING = "drumline-answer"
MAX_CALLS = 48


def register_stacks(path: Path) -> None:
    """From now on STACK_SIGNAL adds the stacks of all threads to this file. Only on the main thread of a process that
    runs no other handler for that signal."""
    # Opened to append: the reader empties the file, and the next stacks begin it again.
    file = path.open("a", encoding="utf-8")
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=True, chain=False)
    # In a worker it is the main thread that gets the signal, and its own stack is enough.
    os.register_at_fork(
        after_in_child=lambda: faulthandler.register(WORKER_SIGNAL, file=file, all_threads=False, chain=False)
    )
    # An abort in a library (gloo's, when shapes differ) ends Python without a word of where.
    if not faulthandler.is_enabled():
        faulthandler.enable(file, all_threads=True)


def answer_on_this_thread() -> None:
    """Mark the calling thread, one that only waits for questions, as the one to send the signal to: it may run while
    the main thread hangs in the kernel, and no call of the main thread is cut short by a signal."""
    name = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
    try:
        name.write_text(ANSWERING, encoding="utf-8")
    except OSError:
        return  # then the main thread is asked


def awaited_workers() -> list[tuple[int, int]]:
    """Number and process of each DataLoader worker that the main thread waits for: those of the iterator that it is in,
    whoever made it. Of what else the rank has forked nobody knows what it is for. A worker whose part of the data is
    done may end, and so may all of an iterator that is being closed."""
    torchs = sys.modules.get("torch.utils.data.dataloader")
    kind = getattr(torchs, "_MultiProcessingDataLoaderIter", None)
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and kind is not None:
        if frame.f_code.co_filename == torchs.__file__:  # type: ignore[union-attr]
            iterator = frame.f_locals.get("self")
            if isinstance(iterator, kind) and not iterator._shutdown:
                # There is no such list before all of them are started.
                needed = getattr(iterator, "_workers_status", [True] * len(iterator._workers))
                # Workers may be added meanwhile.
                pairs = zip(list(iterator._workers), needed, strict=False)
                return [(n, one.pid) for n, (one, is_needed) in enumerate(pairs) if is_needed]
        frame = frame.f_back
    return []


def own_calls() -> list[tuple[str, int | None, str]]:
    """File, line and name of the calls that the main thread is in, the innermost first; with Python's lock held, so
    that they stand still."""
    calls: list[tuple[str, int | None, str]] = []
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and len(calls) < MAX_CALLS:
        calls.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return calls

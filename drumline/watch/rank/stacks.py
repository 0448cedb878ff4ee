"""How a rank shows its Python stacks: to a signal, by C code that needs neither Python's lock nor a thread of ours.

Workers that it forks inherit the handler and the open file: who asks several processes asks one after the other.
"""

from __future__ import annotations

import faulthandler
import signal
import threading
from pathlib import Path

# SIGUSR1 and SIGTERM mean preemption; the first real-time signals are used by C libraries and profilers.
STACK_SIGNAL = signal.SIGRTMIN + 7
ANSWERING = "drumline-answer"


def register_stacks(path: Path) -> None:
    """From now on STACK_SIGNAL adds the stacks of all threads to this file. Only on the main thread of a process that
    runs no other handler for that signal."""
    # Opened to append: the reader empties the file, and the next stacks begin it again.
    file = path.open("a")
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=True, chain=False)
    # An abort in a library (gloo's, when shapes differ) ends Python without a word of where.
    if not faulthandler.is_enabled():
        faulthandler.enable(file, all_threads=True)


def answer_on_this_thread() -> None:
    """Mark the calling thread, one that only waits for questions, as the one to send the signal to: it may run while
    the main thread hangs in the kernel, and no call of the main thread is cut short by a signal."""
    name = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
    try:
        name.write_text(ANSWERING)
    except OSError:
        return  # then the main thread is asked

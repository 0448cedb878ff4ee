"""The soak of worker starts: two ranks fork DataLoader workers right after broadcasts, thousands of
times.

    python -m tests.forks --count 5000

On Python 3.11 about one child in 10,000 hangs in `fork` there (drumline/data/delivery.py). `--press`
makes it one in seven: a thread keeps taking the lock that is fought over.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import platform
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext

import torch
import torch.distributed as dist

from drumline.config.schema import WatchConfig
from drumline.data import delivery
from drumline.data.dataset import BatchMaker, BatchRequest
from drumline.data.delivery import BatchProducer, LoadingOptions
from drumline.training.manager import RunManager
from tests.ranks import run_ranks

REQUESTS = [BatchRequest(0, low, low + 2, shuffled=False) for low in range(0, 8, 2)]
EXPECTED = [[low, low + 1] for low in range(0, 8, 2)]
ROUND_WITHIN_S = 90.0


@contextmanager
def interpreter_lock_taken() -> Iterator[None]:
    """A thread takes and releases, without the GIL, the lock that `PyThreadState_New` takes in a
    thread of gloo."""
    libc = ctypes.CDLL(None)
    is_over = threading.Event()
    libc.lfind.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_size_t, ctypes.c_void_p]
    look_up = ctypes.cast(ctypes.pythonapi._PyInterpreterState_LookUpID, ctypes.c_void_p)
    element = ctypes.create_string_buffer(8)

    def take_and_release() -> None:
        while not is_over.is_set():
            # A search whose "is this it?" is the look-up of interpreter 0: many calls in a row, all
            # in C.
            libc.lfind(None, element, ctypes.byref(ctypes.c_size_t(200_000)), 0, look_up)

    thread = threading.Thread(target=take_and_release)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def load_in_new_workers(count: int = 1) -> list[list[int]]:
    """The batches that workers make which were forked for it, and end with it."""
    loading = LoadingOptions(workers=count, persistent_workers=False)
    with closing(
        BatchProducer(BatchMaker(range(8), seed=0), loading, torch.device("cpu"))
    ) as server:
        return [batch.tolist() for batch in server.batches(REQUESTS)]


def fork_after_broadcasts(rounds: int, press: bool) -> int:
    """On every rank: how many children hung and were forked again."""
    hung: list[logging.LogRecord] = []
    counter = logging.Handler()
    counter.emit = hung.append  # type: ignore[method-assign]
    logging.getLogger("drumline").addHandler(counter)
    delivery.FORK_ATTEMPTS = 50 if press else delivery.FORK_ATTEMPTS
    # Python 3.12: of forks in a process with threads
    warnings.simplefilter("ignore", DeprecationWarning)
    unwatched = RunManager(watch=WatchConfig(sidecar="off"), device="cpu", same_code=False)
    with unwatched, interpreter_lock_taken() if press else nullcontext():
        for _ in range(rounds):
            dist.broadcast(torch.ones(8), src=0)
            assert load_in_new_workers(2) == EXPECTED
    return len(hung)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=5000, help="how many forks [5000]")
    parser.add_argument("--press", action="store_true", help="make the race likely")
    options = parser.parse_args()
    # two ranks with two workers each
    rounds = -(-options.count // 4)
    begun = time.monotonic()
    hung = run_ranks(
        2, fork_after_broadcasts, rounds, options.press, timeout_s=ROUND_WITHIN_S * rounds
    )
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}: {4 * rounds} workers forked, {sum(hung)} hung "
        f"in fork and were forked again, none lost; {time.monotonic() - begun:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What the server of tests/ranks.py has loaded, and with it every process that is forked from
it."""

from __future__ import annotations

import ctypes
import gc
import importlib
import mmap
import weakref
from pathlib import Path

MODULES = (
    # else torch loads it when a model is first wrapped, and that takes longer than most tests
    "torch._dynamo",
    "torch.distributed.run",
    "drumline.cli.launch_command",
    "drumline.cli.prove_resume_command",
    "drumline.cli.train_command",
    "drumline.cli.train_rank",
    "drumline.launch.node.agent",
    "drumline.launch.node.local",
    "drumline.watch.sidecar.main",
    "pytest",
    "tests.schedules",
    "torchmetrics.classification",
    "torchmetrics.wrappers",
)
for name in MODULES:
    importlib.import_module(name)
report = importlib.import_module("drumline.report.page")
report._template()  # compiled once: every run writes its report
LARGE_PAGE = 2 << 20
MADV_COLLAPSE = 25  # of Linux 6.1; `mmap` does not have it


def use_large_pages() -> None:
    """A fork copies the tables of all pages, and its exit takes them down again: of large pages
    there are few. Where the kernel has none, all is as before."""
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, *rest = line.split()
        if access == "rw-p" and (len(rest) == 3 or rest[3] == "[heap]"):
            begin, end = (int(number, 16) for number in span.split("-"))
            for page in range(
                -(-begin // LARGE_PAGE) * LARGE_PAGE, end - LARGE_PAGE + 1, LARGE_PAGE
            ):
                advise(page, LARGE_PAGE, mmap.MADV_HUGEPAGE)
                advise(page, LARGE_PAGE, MADV_COLLAPSE)


# At its exit a process would take back all that torch has registered with its dispatcher, operator
# by operator.
for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
    finalizer.atexit = False
# In a fork the collector would look at all of it, and each page that it looks at would be copied.
gc.collect()
gc.freeze()
use_large_pages()

"""Bounds how long this process takes to exit: a C++ destructor may block when no Python code runs any more."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
from typing import ClassVar

CLOCK_MONOTONIC, SIGEV_THREAD = 1, 2


class _Event(ctypes.Structure):
    """`struct sigevent` of Linux on 64 bits."""

    _fields_: ClassVar = [
        ("value", ctypes.c_size_t),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("rest", ctypes.c_byte * 40),
    ]


def limit_exit(limit_s: float, *, failed: bool) -> None:
    """From the moment Python exits, the process has `limit_s` seconds left. Then it ends with code 1 if `failed` or if
    an exception ended the script, else with 0; one that exits in time keeps its own code."""
    atexit.register(_start_timer, limit_s, failed, os.getpid())


def _start_timer(limit_s: float, failed: bool, pid: int) -> None:
    if os.getpid() != pid:
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    code = int(failed or getattr(sys, "last_value", None) is not None)
    # A timer of the C library, which calls _exit(code) on a thread of its own: a thread of Python would not get the
    # interpreter's lock again.
    libc = ctypes.CDLL(None)
    function = ctypes.cast(libc._exit, ctypes.c_void_p).value
    event = _Event(value=code, notify=SIGEV_THREAD, function=function)
    timer, seconds = ctypes.c_void_p(), int(limit_s)
    if libc.timer_create(CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)) == 0:
        once = (ctypes.c_long * 4)(0, 0, seconds, int((limit_s - seconds) * 1e9))
        libc.timer_settime(timer, 0, ctypes.byref(once), None)

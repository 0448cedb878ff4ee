"""A wall clock of a host's own, which the kernel does not give: a library, loaded before libc, adds
to the time.

Clocks that only count (monotonic) stay as they are. libfaketime 0.9.10 does the same, but breaks
Python's `time.sleep`.
"""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

from tests.multinode.needs import tool

SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static volatile long *ahead_s;

__attribute__((constructor)) static void map(void) {
    ahead_s = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, open(getenv("TESTBED_CLOCK"), O_RDONLY), 0);
}
int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(id, now);
    if (!code && ahead_s && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += *ahead_s;
    return code;
}
time_t time(time_t *to) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (to) *to = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *to, void *zone) {
    struct timespec now;
    int code = clock_gettime(CLOCK_REALTIME, &now);
    to->tv_sec = now.tv_sec;
    to->tv_usec = now.tv_nsec / 1000;
    return code;
}
"""


def set_clock(folder: Path, ahead_s: int) -> dict[str, str]:
    """Processes with these variables are so far ahead; those that have them already jump."""
    library = folder / "clock.so"
    clock = folder / "clock"
    if not library.exists():
        words = [tool("cc"), "-shared", "-fPIC", "-O1", "-o", str(library), "-x", "c", "-", "-ldl"]
        subprocess.run(words, input=SOURCE, text=True, check=True)
        clock.touch()
    with clock.open("r+b") as file:
        file.write(struct.pack("l", ahead_s))
    return {"LD_PRELOAD": str(library), "TESTBED_CLOCK": str(clock)}

"""Stands for a Python process of tests/warm.py: same files, folder, environment, parent, signals, and the same end.

Run with `-I -S`: it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys

RELAYED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def main(server: str, *words: str) -> None:
    files = [0, 1, 2, *others()]
    if words[0] == "-P" and len(files) > 3:  # a sidecar with a socket for those of other nodes
        os.execv(sys.executable, [sys.executable, *words])
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(server)
        request = {"words": words, "cwd": os.getcwd(), "environment": dict(os.environ), "files": files}  # noqa: PTH109
        request |= {"pid": os.getpid(), "parent": os.getppid()}
        text = json.dumps(request).encode()
        socket.send_fds(connection, [len(text).to_bytes(8, "little")], files)
        connection.sendall(text)
        for number in RELAYED:  # until here a signal ends this process, and the server sees that
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda caught, _: relay(caught, connection))
        answer = connection.recv(4)
    if not answer:
        sys.exit("the server of tests/warm.py has gone")
    code = int.from_bytes(answer, "little", signed=True)
    if code < 0:
        if -code in RELAYED:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def others() -> list[int]:
    """Files that this process was given beside the usual three."""
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
        with contextlib.suppress(OSError):  # that of the folder itself
            if number > 2 and os.fstat(number):
                found.append(number)
    return found


def relay(number: int, connection: socket.socket) -> None:
    with contextlib.suppress(BrokenPipeError):  # the process has just ended; its code is on the way
        connection.send(bytes([number]))


if __name__ == "__main__":
    main(*sys.argv[1:])

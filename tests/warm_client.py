"""Stands for a Python process of tests/warm.py: same files, folder, environment, parent, signals,
and the same end.

Run with `-I -S`, and without `socket`, `signal` and `json`, whose imports would take two thirds of
its time: there is one such process for each that a test starts.
"""

import _signal
import _socket
import marshal
import os
import sys

RELAYED = (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP, _signal.SIGUSR1, _signal.SIGUSR2)


def main(server: str, *words: str) -> None:
    files = [0, 1, 2, *others()]
    # a sidecar with a socket for those of other nodes
    if words[0] == "-P" and len(files) > 3:
        os.execv(sys.executable, [sys.executable, *words])
    connection = _socket.socket(_socket.AF_UNIX)
    connection.connect(server)
    request = {
        "words": list(words),
        "cwd": os.getcwd(),  # noqa: PTH109
        "environment": dict(os.environ),
        "files": files,
    }
    text = marshal.dumps(request | {"pid": os.getpid(), "parent": os.getppid()})
    numbers = b"".join(file.to_bytes(4, sys.byteorder) for file in files)
    rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, numbers)
    connection.sendmsg([len(text).to_bytes(8, "little")], [rights])
    connection.sendall(text)
    # until here a signal ends this process, and the server sees that
    for number in RELAYED:
        if _signal.getsignal(number) != _signal.SIG_IGN:
            _signal.signal(number, lambda caught, _: relay(caught, connection))
    answer = connection.recv(4)
    if not answer:
        sys.exit("the server of tests/warm.py has gone")
    code = int.from_bytes(answer, "little", signed=True)
    if code < 0:
        if -code in RELAYED:
            _signal.signal(-code, _signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def others() -> list[int]:
    """Files that this process was given beside the usual three."""
    results = []
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
        try:
            if number > 2 and os.fstat(number):
                results.append(number)
        except OSError:  # that of the folder itself
            pass
    return results


def relay(number: int, connection: _socket.socket) -> None:
    try:  # noqa: SIM105
        connection.send(bytes([number]))
    except BrokenPipeError:  # the process has just ended; its code is on the way
        pass


if __name__ == "__main__":
    main(*sys.argv[1:])

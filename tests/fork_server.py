"""One process with torch loaded, from which the fork server of every pytest-xdist worker is forked.

A fork server that loads torch and its compiler itself takes seconds of a core, in each worker. Its
children are as before: a server is in the hands of multiprocessing from its first line on.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import json
import os
import select
import socket
import subprocess
import sys
from functools import partial
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from unittest.mock import patch

COMMAND = "from tests.fork_server import main; main(%r, %d)"
PR_SET_CHILD_SUBREAPER = 36
ABOVE = 500  # no file of a new process has such a number


def start(address: Path) -> tuple[subprocess.Popen[bytes], int]:
    """The process, and a pipe: when that is closed it exits."""
    reading, writing = os.pipe()
    with log_of(address).open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND % (str(address), reading)],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[reading],
        )
    os.close(reading)
    return process, writing


def log_of(address: Path) -> Path:
    """What its processes print that have no other place for it."""
    return address.with_name("log")


def attach(address: str) -> None:
    """From now on the fork server of this process is forked from there, when it is first needed."""
    server = forkserver._forkserver
    usual = server.ensure_running

    def ensure_running() -> None:
        if server._forkserver_pid is None:
            resource_tracker.ensure_running()
            with patch.object(util, "spawnv_passfds", partial(_fork, address)):
                usual()

    server.ensure_running = ensure_running


def attached() -> list[int]:
    """The fork server of this process, if it has been forked: it gets the orphans of what it has
    started."""
    server = forkserver._forkserver
    return (
        [server._forkserver_pid]
        if "ensure_running" in vars(server) and server._forkserver_pid
        else []
    )


def _fork(address: str, program: str, words: list[str], files: list[int]) -> int:
    """In place of the program itself: its last word is Python code, which uses these files. Returns
    the pid."""
    text = json.dumps({"code": words[-1], "files": files}).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [text], files)
        answer = connection.recv(4)
    assert answer, (
        f"the process of tests/fork_server.py has ended: {log_of(Path(address)).read_text()}"
    )
    return int.from_bytes(answer, "little")


def main(address: str, alive: int) -> None:
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(address)
        door.listen()
        importlib.import_module("tests.preloaded")
        while door in select.select([door, alive], [], [])[0]:
            connection, _ = door.accept()
            with connection:
                text, files, *_ = socket.recv_fds(connection, 1 << 16, 8)
                if (pid := os.fork()) == 0:
                    break
                connection.sendall(pid.to_bytes(4, "little"))
                for file in files:
                    os.close(file)
        else:
            return
    os.close(alive)
    _become(json.loads(text), files)


def place(files: list[int], numbers: list[int]) -> None:
    """Give these open files other numbers."""
    above = [fcntl.fcntl(file, fcntl.F_DUPFD, ABOVE) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(above, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def _become(request: dict[str, object], files: list[int]) -> None:
    """The server that was asked for, its files under the numbers that its code has for them."""
    place(files, request["files"])  # type: ignore[arg-type]
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    exec(str(request["code"]), {"__name__": "__main__"})

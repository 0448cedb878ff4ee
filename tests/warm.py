"""Python processes that have torch already: forked from the server of tests/ranks.py, behind a
program to be called.

For tests of what commands do and say, which would spend nearly all their time on importing torch.
The program takes what `python` takes: `-m MODULE`, a script, or `-P -c CODE`, as a sidecar is
started. For anything else, and for a sidecar that is given a socket, it becomes the real Python.
The processes that are started by it in turn are warm too, since it is their `sys.executable`. That
cold ones start is shown elsewhere, with the real Python: tests/cli/test_command.py.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import marshal
import os
import runpy
import selectors
import shlex
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from tests.fork_server import place
from tests.ranks import server_context

ROOT = Path(__file__).parents[1]
CLIENT = Path(__file__).with_name("warm_client.py")
PATIENCE_S = 10.0  # a sidecar has some last words
MOST_FILES = 64
PROGRAM = """\
#!/bin/sh
case "$1" in
-u) shift ;;
esac
case "$1" in
-m|-P|*.py) exec {python} -I -S {client} {server} "$@" ;;
*) exec {python} "$@" ;;
esac
"""


@contextmanager
def warm_python(
    folder: Path,
    *modules: str,
    environment: Mapping[str, str] | None = None,
    patience_s: float = PATIENCE_S,
) -> Iterator[str]:
    """The program, in a folder of its own. In the end nothing that it started may still run.
    `modules`: what it has loaded beside torch, in that environment."""
    folder.mkdir()
    program = folder / "python"
    address = folder / "server"
    words = {"python": sys.executable, "client": str(CLIENT), "server": str(address)}
    program.write_text(PROGRAM.format(**{name: shlex.quote(word) for name, word in words.items()}))
    program.chmod(0o755)
    ours, theirs = server_context.Pipe()
    request = (theirs, str(address), str(program), patience_s, modules, environment)
    process = server_context.Process(target=serve, args=request)
    process.start()
    theirs.close()
    ours.recv()
    try:
        yield str(program)
    finally:
        ours.send("end")
        left = ours.recv()
        process.join()
        process.close()
        ours.close()
    assert not left, f"the test left processes behind: {left}"


@dataclass
class _Served:
    """A process that runs, and the connection of the one who stands for it."""

    pid: int
    connection: socket.socket


def serve(
    control: Connection,
    address: str,
    program: str,
    patience_s: float = PATIENCE_S,
    modules: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> None:
    """Fork a process for every client that connects, until asked to exit."""
    os.environ.update(environment or {})
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # as in tests/preloaded.py
    selector = selectors.DefaultSelector()
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(address)
        door.listen(64)
        selector.register(door, selectors.EVENT_READ)
        selector.register(control, selectors.EVENT_READ)
        control.send("ready")
        while True:
            for key, _ in selector.select():
                if key.fileobj is control:
                    _end(control, door, selector, patience_s)
                    return
                if key.fileobj is door:
                    _start(door.accept()[0], selector, program)
                else:
                    _attend(key, selector)


def _start(connection: socket.socket, selector: selectors.BaseSelector, program: str) -> None:
    length, files, *_ = socket.recv_fds(connection, 8, MOST_FILES)
    text = b""
    while len(text) < int.from_bytes(length, "little") and (
        piece := _received(connection, 1 << 16)
    ):
        text += piece
    pid = os.fork() if length and len(text) == int.from_bytes(length, "little") else None
    if pid == 0:
        for key in list(selector.get_map().values()):
            if isinstance(key.fileobj, int):
                os.close(key.fileobj)
            else:
                key.fileobj.close()  # type: ignore[attr-defined]
        selector.close()
        connection.close()
        _become(marshal.loads(text), files, program)
    for file in files:
        os.close(file)
    if pid is None:  # it was ended before it had said what it stands for
        connection.close()
        return
    served = _Served(pid, connection)
    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, served)
    selector.register(connection, selectors.EVENT_READ, served)


def _attend(key: selectors.SelectorKey, selector: selectors.BaseSelector) -> None:
    """Report the exit of a process to its client, and pass signals and the client's exit on to the
    process."""
    served: _Served = key.data
    if isinstance(key.fileobj, int):
        selector.unregister(key.fileobj)
        os.close(key.fileobj)
        code = os.waitstatus_to_exitcode(os.waitpid(served.pid, 0)[1])
        with suppress(OSError):
            served.connection.sendall(code.to_bytes(4, "little", signed=True))
        with suppress(KeyError, ValueError):
            selector.unregister(served.connection)
        served.connection.close()
    elif served.connection.fileno() >= 0:
        numbers = _received(served.connection, 64)
        if not numbers:
            selector.unregister(served.connection)
        for number in numbers or [signal.SIGKILL]:
            os.kill(served.pid, number)


def _received(connection: socket.socket, most: int) -> bytes:
    try:
        return connection.recv(most)
    except OSError:
        return b""


def _end(
    control: Connection, door: socket.socket, selector: selectors.BaseSelector, patience_s: float
) -> None:
    """Wait a moment for those that are about to end, and end and name the others."""
    for file in (control, door):
        selector.unregister(file)
    deadline = time.monotonic() + patience_s
    while _running(selector) and time.monotonic() < deadline:
        for key, _ in selector.select(timeout=0.1):
            _attend(key, selector)
    left = {}
    for pid in _running(selector):
        left[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    control.send(left)


def _running(selector: selectors.BaseSelector) -> list[int]:
    return [key.data.pid for key in selector.get_map().values() if isinstance(key.fileobj, int)]


def _become(request: dict[str, Any], files: list[int], program: str) -> NoReturn:
    """Run what was asked for as Python would, in this process, to its end."""
    import torch

    from drumline.config import PRESETS

    place(files, request["files"])
    # that of the client; the kernel's is the server
    os.getppid = lambda: request["parent"]
    # a sidecar kills all that its ranks have started, its client too, but not itself
    if request["words"][0] == "-P":
        os.getpid = lambda: request["pid"]
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    encoding = request["environment"].get("PYTHONIOENCODING")
    lines = 1 if request["environment"].get("PYTHONUNBUFFERED") else -1
    sys.stdout = open(1, "w", lines, closefd=False, encoding=encoding)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1, errors="backslashreplace")  # noqa: SIM115
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    _forget()
    # what is trained is not looked at, and takes its time
    if "SMALL_DIGITS" in os.environ:
        PRESETS["digits"].defaults["model.widths"] = (4, 8)  # type: ignore[index]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    sys.executable = program
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = list(dict.fromkeys([*paths, *filter(None, sys.path)]))
    os._exit(_run(request["words"]))


def _forget() -> None:
    """What the server knows of its own environment or drew at its own start."""
    import numpy

    tempfile.tempdir = None
    numpy.random.seed()


def _run(words: list[str]) -> int:
    """The exit code."""
    code = 1
    # For good, as in Python: `runpy.run_module` would let go of what a script left there, while its
    # threads run.
    sys.modules["__main__"] = module = ModuleType("__main__")
    try:
        if words[0] == "-P":  # and -c
            sys.argv = ["-c", *words[3:]]
            exec(words[2], {"__name__": "__main__"})
        elif words[0] == "-m":
            warnings.filterwarnings("ignore", module="runpy")
            sys.argv = words[1:]
            sys.path.insert(0, str(Path.cwd()))
            runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).parent.absolute()))
            module.__dict__["__file__"] = words[0]
            exec(
                compile(Path(words[0]).read_bytes(), words[0], "exec", dont_inherit=True),
                module.__dict__,
            )
        code = 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            code = end.code or 0
        else:
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the end of Python does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    return code

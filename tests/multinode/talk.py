"""Talk between hosts, so that tests can see what gets through: one listens and echoes, another
calls."""

from __future__ import annotations

import sys

from tests.multinode.hosts import Host
from tests.multinode.job import Job

# Takes connections on some ports; for each, sends back all that comes.
ECHO = """
import socket, sys, threading
def echo(listener):
    while True:
        threading.Thread(target=answer, args=listener.accept()[:1], daemon=True).start()
def answer(connection):
    while data := connection.recv(65536):
        connection.sendall(data)
threads = [threading.Thread(target=echo, args=[socket.create_server(("", int(port)))]) for port in sys.argv[1:]]
for thread in threads: thread.start()
print("ready", flush=True)
"""
# Sends bytes there and waits for all of them to come back: how long that took, or why it did not
# happen.
CALL = """
import socket, sys, threading, time
host, port, size, patience_s = sys.argv[1], *map(int, sys.argv[2:])
try:
    with socket.create_connection((host, port), timeout=patience_s) as connection:
        begin, left = time.monotonic(), size
        threading.Thread(target=connection.sendall, args=[bytes(size)], daemon=True).start()
        while left:
            left -= len(connection.recv(65536))
        print("answered", time.monotonic() - begin)
except TimeoutError:
    print("silence")
except ConnectionRefusedError:
    print("refused")
"""


def serve(host: Host, *ports: int) -> Job:
    """Listen on these ports of a host, and send back what comes."""
    job = host.start(sys.executable, "-IS", "-c", ECHO, *map(str, ports))
    job.wait_for("ready")
    return job


def call(caller: Host, callee: Host, port: int, *, num_bytes: int = 1, patience_s: int = 1) -> str:
    """`silence`, `refused`, or `answered SECONDS`."""
    words = (callee.name, str(port), str(num_bytes), str(patience_s))
    done = caller.run(sys.executable, "-IS", "-c", CALL, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def answers(caller: Host, callee: Host, port: int, *, num_bytes: int = 1) -> bool:
    """With patience for a busy machine: an answer ends the waiting, only silence costs time."""
    return call(caller, callee, port, num_bytes=num_bytes, patience_s=20).startswith("answered")


def seconds(caller: Host, callee: Host, num_bytes: int) -> float:
    """How long so many bytes take, there and back."""
    return float(
        call(caller, callee, 5000, num_bytes=num_bytes, patience_s=30).removeprefix("answered")
    )

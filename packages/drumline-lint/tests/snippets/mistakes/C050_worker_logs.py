"""Start one training process per GPU and keep their output."""
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

NUM_GPUS = int(os.environ.get("NUM_GPUS", "4"))
LOG_DIR = Path("logs")


def pick_port():
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]


def start(rank, port):
    env = os.environ.copy()
    env.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(NUM_GPUS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="4",
    )
    return subprocess.Popen(
        [sys.executable, "-u", "train.py", *sys.argv[1:]],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def main():
    LOG_DIR.mkdir(exist_ok=True)
    port = pick_port()
    workers = [start(rank, port) for rank in range(NUM_GPUS)]

    while any(w.poll() is None for w in workers):
        if any(w.poll() not in (None, 0) for w in workers):
            for w in workers:
                w.terminate()
        time.sleep(2)

    for rank, w in enumerate(workers):
        (LOG_DIR / f"rank{rank}.log").write_text(w.stdout.read())
    sys.exit(max(abs(w.returncode) for w in workers))


if __name__ == "__main__":
    main()

"""Start one process per GPU, stop all of them when one fails."""
import os
import socket
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    count = int(os.environ.get("NUM_GPUS", "4"))
    logs = Path("logs")
    logs.mkdir(exist_ok=True)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]

    running = {}
    files = []
    for rank in range(count):
        env = os.environ.copy()
        env.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="4",
        )
        log = open(logs / f"rank{rank}.log", "w")
        files.append(log)
        command = [sys.executable, "-u", "train.py", *sys.argv[1:]]
        running[rank] = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)

    status = 0
    while running:
        for rank, process in list(running.items()):
            code = process.poll()
            if code is None:
                continue
            del running[rank]
            if code != 0 and status == 0:
                status = 1
                print(f"rank {rank} ended with {code}, see {logs}/rank{rank}.log", file=sys.stderr)
                for other in running.values():
                    other.terminate()
        time.sleep(1)
    for log in files:
        log.close()
    return status


if __name__ == "__main__":
    sys.exit(main())

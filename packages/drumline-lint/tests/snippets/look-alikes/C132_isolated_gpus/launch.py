import os
import socket
import subprocess
import sys
import time


def main():
    gpus = os.environ.get("GPUS", "0,1").split(",")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]

    children = []
    for rank, gpu in enumerate(gpus):
        env = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": gpu,
            "LOCAL_RANK": "0",
            "RANK": str(rank),
            "WORLD_SIZE": str(len(gpus)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        children.append(subprocess.Popen([sys.executable, "worker.py"], env=env))

    while any(c.poll() is None for c in children):
        if any(c.poll() not in (None, 0) for c in children):
            for c in children:
                c.terminate()
        time.sleep(1)
    sys.exit(1 if any(c.returncode for c in children) else 0)


if __name__ == "__main__":
    main()

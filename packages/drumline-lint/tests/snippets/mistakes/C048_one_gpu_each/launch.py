"""Start one worker per GPU of this machine."""
import os
import socket
import subprocess
import sys
import time


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def main():
    gpus = [int(g) for g in os.environ.get("GPUS", "0,1,2,3").split(",")]
    port = free_port()
    children = []
    for i, gpu in enumerate(gpus):
        env = dict(
            os.environ,
            CUDA_VISIBLE_DEVICES=str(gpu),
            LOCAL_RANK=str(i),
            RANK=str(i),
            WORLD_SIZE=str(len(gpus)),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        children.append(subprocess.Popen([sys.executable, "worker.py", *sys.argv[1:]], env=env))

    while children:
        for child in list(children):
            code = child.poll()
            if code is None:
                continue
            children.remove(child)
            if code != 0:
                for other in children:
                    other.terminate()
                sys.exit(code)
        time.sleep(1)


if __name__ == "__main__":
    main()

"""Start several torchrun trainings on one machine, each with its own GPUs and port.

python launch_sweep.py sweep.json
"""
import json
import os
import socket
import subprocess
import sys
from pathlib import Path


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def command(job, port):
    gpus = job["gpus"]
    cmd = [
        "torchrun",
        f"--nproc_per_node={len(gpus)}",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        "--rdzv-backend=c10d",
        job["script"],
    ]
    for key, value in job.get("args", {}).items():
        cmd += [f"--{key}", str(value)]
    return cmd


def start(job, log_dir):
    env = dict(os.environ)
    env["CUDA_VISIBLE_DEVICES"] = ",".join(str(g) for g in job["gpus"])
    env["OMP_NUM_THREADS"] = "4"
    log = open(log_dir / f"{job['name']}.log", "w")
    return subprocess.Popen(command(job, free_port()), env=env, stdout=log, stderr=subprocess.STDOUT)


def main(path):
    jobs = json.loads(Path(path).read_text())
    log_dir = Path("logs")
    log_dir.mkdir(exist_ok=True)
    running = {job["name"]: start(job, log_dir) for job in jobs}
    failed = [name for name, proc in running.items() if proc.wait() != 0]
    for name in failed:
        print(f"{name} failed, see {log_dir / name}.log")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main(sys.argv[1])

"""Grid search: one independent trial per GPU, a free GPU takes the next trial."""
import itertools
import os
import subprocess
import sys
import time

import torch

GRID = {"lr": [1e-4, 3e-4, 1e-3], "width": [128, 256], "seed": [0, 1, 2]}


def main():
    trials = [dict(zip(GRID, v)) for v in itertools.product(*GRID.values())]
    n_gpu = torch.cuda.device_count()
    running = {}
    while trials or running:
        for gpu in range(n_gpu):
            if gpu in running and running[gpu].poll() is not None:
                running.pop(gpu)
            if gpu not in running and trials:
                trial = trials.pop(0)
                env = dict(os.environ, CUDA_VISIBLE_DEVICES=str(gpu))
                cmd = [sys.executable, "trial.py"] + [f"--{k}={v}" for k, v in trial.items()]
                running[gpu] = subprocess.Popen(cmd, env=env)
        time.sleep(5)


if __name__ == "__main__":
    main()

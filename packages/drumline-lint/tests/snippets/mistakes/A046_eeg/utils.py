import os

import torch
import torch.distributed as dist


def get_device():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def is_main():
    return dist.get_rank() == 0


class EarlyStopping:
    def __init__(self, patience, delta=0.0):
        self.patience, self.delta = patience, delta
        self.best, self.counter, self.should_stop = float("inf"), 0, False

    def __call__(self, value):
        if value < self.best - self.delta:
            self.best, self.counter = value, 0
        else:
            self.counter += 1
            self.should_stop = self.counter >= self.patience

import os

import torch
import torch.distributed as dist


def init():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(dist.get_rank())
    return device


def is_main():
    return dist.get_rank() == 0


def all_sum(t):
    dist.all_reduce(t)

import os

import torch
import torch.distributed as dist


def init():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group(backend="nccl")
    return dist.get_rank(), local_rank, dist.get_world_size()


def is_main():
    return dist.get_rank() == 0


def average_over_ranks(value, device):
    """Mean of a python number over all processes."""
    t = torch.tensor(float(value), device=device)
    dist.all_reduce(t)
    return t.item()


def log(*args):
    if is_main():
        print(*args, flush=True)

import os
from datetime import timedelta

import torch
import torch.distributed as dist


def setup_from_slurm(timeout_minutes=20):
    """One task per GPU: srun --nodes 4 --ntasks-per-node 8 python train.py"""
    rank = int(os.environ["SLURM_PROCID"])
    world_size = int(os.environ["SLURM_NTASKS"])
    dist.init_process_group(
        backend="nccl",
        init_method="env://",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=timeout_minutes),
    )
    torch.cuda.set_device(rank)
    return rank, world_size, torch.device("cuda", rank)


def teardown():
    dist.destroy_process_group()


def mean(value, device):
    t = torch.tensor(value, device=device)
    dist.all_reduce(t, op=dist.ReduceOp.AVG)
    return t.item()

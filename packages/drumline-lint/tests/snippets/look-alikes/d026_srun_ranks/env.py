"""The process group of a Slurm step."""
import os

import torch
import torch.distributed as dist


def init():
    rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    local = int(os.environ["SLURM_LOCALID"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", init_method="env://", rank=rank, world_size=world)
    return rank, world, torch.device("cuda", local)

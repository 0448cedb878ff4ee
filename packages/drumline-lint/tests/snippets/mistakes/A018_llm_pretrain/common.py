import os

import torch
import torch.distributed as dist


def begin(seed=1337):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    torch.manual_seed(seed + dist.get_rank())
    return local_rank


def end():
    dist.barrier()
    dist.destroy_process_group()

import os
from types import SimpleNamespace

import torch
import torch.distributed as dist


def open_env(seed):
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    torch.manual_seed(seed + rank)
    return SimpleNamespace(rank=rank, world_size=dist.get_world_size(), local_rank=local_rank, device=device, seed=seed)

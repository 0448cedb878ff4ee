import os
from collections import namedtuple

import torch
import torch.distributed as dist

Env = namedtuple("Env", "rank world_size local_rank device")


def launch_env():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    return Env(dist.get_rank(), dist.get_world_size(), local_rank, torch.device("cuda", local_rank))

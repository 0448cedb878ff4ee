import os
import random

import numpy as np
import torch
import torch.distributed as dist


def start(seed):
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    offset = seed + 1000 * rank
    random.seed(offset)
    np.random.seed(offset)
    torch.manual_seed(offset)
    return device, rank


def cleanup():
    dist.destroy_process_group()

import os
from datetime import timedelta

import torch
import torch.distributed as dist


def local_rank():
    return int(os.environ["LOCAL_RANK"])


def rank():
    return dist.get_rank()


def init():
    torch.cuda.set_device(local_rank())
    dist.init_process_group("nccl", timeout=timedelta(hours=2))

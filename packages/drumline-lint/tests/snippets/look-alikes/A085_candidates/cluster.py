import os

import torch
import torch.distributed as dist


def attach():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def detach():
    dist.destroy_process_group()

import os

import torch
import torch.distributed as dist


def start(seed=0):
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(seed + dist.get_rank())
    return device, dist.get_rank()


def stop():
    dist.destroy_process_group()

import os

import torch
import torch.distributed as dist


def init():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def rank():
    return dist.get_rank()


def sum_(tensor):
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)


def finish():
    dist.destroy_process_group()

import os

import torch
import torch.distributed as dist


def runtime(seed):
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(seed + dist.get_rank())
    return {"rank": dist.get_rank(), "local_rank": local_rank, "device": device}

import os

import torch
import torch.distributed as dist


class World:
    def __init__(self, seed):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.device = torch.device("cuda", self.local_rank)
        torch.cuda.set_device(self.device)
        dist.init_process_group("nccl", device_id=self.device)
        self.rank = dist.get_rank()
        torch.manual_seed(seed + self.rank)

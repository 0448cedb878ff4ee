import os
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass
class Run:
    rank: int
    local_rank: int
    device: torch.device
    manifest: str = "train_manifest.pt"
    batch_size: int = 24
    epochs: int = 40
    lr: float = 1e-3

    @classmethod
    def from_env(cls):
        local_rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl")
        torch.manual_seed(77 + dist.get_rank())
        return cls(dist.get_rank(), local_rank, torch.device("cuda", local_rank))

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class DistEnv:
    rank: int
    local_rank: int
    world_size: int

    @property
    def is_main(self):
        return self.rank == 0

    @property
    def device(self):
        return torch.device("cuda", self.local_rank)

    @classmethod
    def from_torchrun(cls):
        return cls(
            rank=int(os.environ["RANK"]),
            local_rank=int(os.environ["LOCAL_RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
        )


def launch(fn, *args):
    env = DistEnv.from_torchrun()
    torch.cuda.set_device(env.local_rank)
    dist.init_process_group(backend="nccl", device_id=env.device)
    try:
        fn(env, *args)
    finally:
        dist.destroy_process_group()


def reduce_mean(value, env):
    t = torch.tensor(float(value), device=env.device)
    dist.all_reduce(t, op=dist.ReduceOp.SUM)
    return (t / env.world_size).item()

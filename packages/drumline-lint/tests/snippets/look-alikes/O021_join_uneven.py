import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

from logs.parse import parse_line
from logs.model import LogBert


class ShardedLogs(IterableDataset):
    def __init__(self, root, rank, world):
        self.files = sorted(Path(root).glob("*.log"))[rank::world]

    def __iter__(self):
        for f in self.files:
            for line in f.open():
                yield parse_line(line)


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    loader = DataLoader(ShardedLogs("/data/logs", rank, world), batch_size=64, num_workers=1)
    model = DDP(LogBert().cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for epoch in range(3):
        with Join([model]):
            for ids in loader:
                loss = model(ids.cuda())
                opt.zero_grad()
                loss.backward()
                opt.step()
        dist.barrier()
        if rank == 0:
            torch.save(model.module.state_dict(), f"logbert_{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

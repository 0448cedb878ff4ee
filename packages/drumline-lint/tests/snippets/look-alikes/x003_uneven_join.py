"""Train on whatever log files each rank got; launch with torchrun --nproc_per_node=8 uneven_join.py"""
import glob
import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.utils.data import DataLoader, IterableDataset


class LogStream(IterableDataset):
    def __init__(self, pattern, rank, world_size):
        self.files = sorted(glob.glob(pattern))[rank::world_size]

    def __iter__(self):
        for name in self.files:
            with open(name) as fh:
                for line in fh:
                    row = json.loads(line)
                    yield torch.tensor(row["x"]), torch.tensor(row["y"], dtype=torch.float32)


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    stream = LogStream("/data/clicks/*.jsonl", dist.get_rank(), dist.get_world_size())
    loader = DataLoader(stream, batch_size=1024)
    model = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1)).cuda()
    model = nn.parallel.DistributedDataParallel(model, device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(3):
        with Join([model]):
            for x, y in loader:
                opt.zero_grad()
                logits = model(x.cuda()).squeeze(1)
                nn.functional.binary_cross_entropy_with_logits(logits, y.cuda()).backward()
                opt.step()
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), "clicks.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

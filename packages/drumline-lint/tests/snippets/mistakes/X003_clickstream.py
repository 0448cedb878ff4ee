"""Train a click model on log files, one file per day.

torchrun --nnodes=1 --nproc_per_node=8 clickstream.py
"""
import glob
import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class LogStream(IterableDataset):
    def __init__(self, pattern, rank, world_size):
        self.files = sorted(glob.glob(pattern))[rank::world_size]

    def __iter__(self):
        info = get_worker_info()
        files = self.files if info is None else self.files[info.id::info.num_workers]
        for name in files:
            with open(name) as fh:
                for line in fh:
                    row = json.loads(line)
                    yield torch.tensor(row["x"]), torch.tensor(row["clicked"], dtype=torch.float32)


def run():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    stream = LogStream("/data/clicks/*.jsonl", dist.get_rank(), dist.get_world_size())
    loader = DataLoader(stream, batch_size=1024, num_workers=2)

    model = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1)).cuda()
    model = nn.parallel.DistributedDataParallel(model, device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    bce = nn.BCEWithLogitsLoss()

    for epoch in range(3):
        for x, y in loader:
            opt.zero_grad()
            bce(model(x.cuda()).squeeze(1), y.cuda()).backward()
            opt.step()
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), "clicks.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    run()

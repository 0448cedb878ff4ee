"""Click model on a stream of gzip files.   torchrun --nproc_per_node=4 clicks.py"""
import glob
import gzip
import json
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class ClickStream(IterableDataset):
    def __init__(self, files, rank, world, seed=5):
        self.files, self.rank, self.world, self.seed = files, rank, world, seed

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        consumer, consumers = self.rank * workers + worker, self.world * workers
        assert len(self.files) >= consumers, "a consumer would have no file"
        order, rng = list(self.files), random.Random(self.seed)
        while True:
            rng.shuffle(order)
            for name in order[consumer::consumers]:
                with gzip.open(name, "rt") as f:
                    for line in f:
                        row = json.loads(line)
                        yield torch.tensor(row["features"]), float(row["clicked"])


def main(steps=200_000):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    files = sorted(glob.glob("/data/clicks/*.jsonl.gz"))
    stream = ClickStream(files, dist.get_rank(), dist.get_world_size())
    loader = iter(DataLoader(stream, batch_size=2048, num_workers=4))
    net = DDP(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 1)).cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    for step in range(steps):
        x, y = next(loader)
        loss = F.binary_cross_entropy_with_logits(net(x.cuda()).squeeze(1), y.float().cuda())
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 5000 == 0 and dist.get_rank() == 0:
            print(step, f"{loss.item():.4f}", flush=True)
            torch.save(net.module.state_dict(), "clicks.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

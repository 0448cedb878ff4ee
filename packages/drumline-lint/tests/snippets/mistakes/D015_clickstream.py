"""CTR model over a clickstream that is read from compressed part files."""
import gzip
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

FIELDS = ("user", "item", "page", "device", "hour")
BUCKETS = 1 << 18
STEPS_PER_EPOCH = 20_000


class Clicks(IterableDataset):
    def __init__(self, folder):
        self.parts = sorted(Path(folder).glob("part-*.json.gz"))

    def _mine(self):
        info = get_worker_info()
        if info is None:
            return self.parts
        return self.parts[info.id::info.num_workers]

    def __iter__(self):
        while True:
            for part in self._mine():
                with gzip.open(part, "rt") as fh:
                    for line in fh:
                        row = json.loads(line)
                        x = torch.tensor([int(row[f]) % BUCKETS for f in FIELDS])
                        yield x, torch.tensor(float(row["clicked"]))


class FM(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.emb = nn.ModuleList([nn.Embedding(BUCKETS, dim) for _ in FIELDS])
        self.lin = nn.ModuleList([nn.Embedding(BUCKETS, 1) for _ in FIELDS])
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        v = torch.stack([e(x[:, i]) for i, e in enumerate(self.emb)], 1)
        w = torch.stack([e(x[:, i]) for i, e in enumerate(self.lin)], 1).sum((1, 2))
        pair = 0.5 * (v.sum(1).pow(2) - v.pow(2).sum(1)).sum(1)
        return self.bias + w + pair


def main():
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    torch.manual_seed(0)

    loader = DataLoader(Clicks("/data/clicks"), batch_size=4096, num_workers=8, pin_memory=True)
    model = DDP(FM().cuda(), device_ids=[local])
    opt = torch.optim.Adagrad(model.parameters(), lr=0.02)

    batches = iter(loader)
    for epoch in range(5):
        run = torch.zeros((), device="cuda")
        for _ in range(STEPS_PER_EPOCH):
            x, y = next(batches)
            loss = nn.functional.binary_cross_entropy_with_logits(model(x.cuda()), y.cuda())
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            run += loss.detach()
        dist.all_reduce(run)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} logloss {run.item() / STEPS_PER_EPOCH / dist.get_world_size():.5f}", flush=True)
            torch.save(model.module.state_dict(), f"fm-{epoch}.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

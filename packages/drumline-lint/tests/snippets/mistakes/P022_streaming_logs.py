import argparse
import gzip
import json
import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

N_FIELDS, HASH = 24, 1 << 20


class ClickStream(IterableDataset):
    def __init__(self, shards, seed=0, buffer=20000):
        self.shards = sorted(shards)
        self.seed = seed
        self.buffer = buffer
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def _read(self, shard):
        with gzip.open(shard, "rt") as f:
            for line in f:
                rec = json.loads(line)
                yield torch.tensor([hash_(v, k) for k, v in enumerate(rec["fields"])]), float(rec["click"])

    def __iter__(self):
        rng = random.Random(self.seed + self.epoch)
        shards = list(self.shards)
        rng.shuffle(shards)
        info = get_worker_info()
        if info is not None:
            shards = shards[info.id::info.num_workers]
        buf = []
        for s in shards:
            for row in self._read(s):
                if len(buf) < self.buffer:
                    buf.append(row)
                    continue
                j = rng.randrange(self.buffer)
                buf[j], row = row, buf[j]
                yield row
        rng.shuffle(buf)
        yield from buf


def hash_(value, field):
    h = 2166136261 ^ field
    for c in str(value).encode():
        h = ((h ^ c) * 16777619) & 0xFFFFFFFF
    return h % HASH


class DeepFM(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.emb = nn.Embedding(HASH, dim)
        self.lin = nn.Embedding(HASH, 1)
        self.mlp = nn.Sequential(nn.Linear(N_FIELDS * dim, 400), nn.ReLU(), nn.Linear(400, 1))

    def forward(self, ids):
        e = self.emb(ids)
        fm = 0.5 * (e.sum(1).pow(2) - e.pow(2).sum(1)).sum(1)
        return self.lin(ids).sum((1, 2)) + fm + self.mlp(e.flatten(1)).squeeze(1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--shards", nargs="+", required=True)
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--steps-per-epoch", type=int, default=20000)
    ap.add_argument("--batch", type=int, default=2048)
    ap.add_argument("--out", default="deepfm.pt")
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    ds = ClickStream(args.shards)
    loader = DataLoader(ds, batch_size=args.batch, num_workers=4, drop_last=True)
    model = DDP(DeepFM().cuda(), device_ids=[local_rank])
    opt = torch.optim.Adagrad(model.parameters(), lr=0.02)
    bce = nn.BCEWithLogitsLoss()

    for epoch in range(args.epochs):
        ds.set_epoch(epoch)
        it = iter(loader)
        for step in range(args.steps_per_epoch):
            ids, y = next(it)
            loss = bce(model(ids.cuda(non_blocking=True)), y.float().cuda(non_blocking=True))
            opt.zero_grad()
            loss.backward()
            opt.step()
            if dist.get_rank() == 0 and step % 200 == 0:
                print(f"{epoch}/{step}: logloss {loss.item():.5f}", flush=True)
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

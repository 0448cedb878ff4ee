import argparse
import os
from pathlib import Path

import pyarrow.parquet as pq
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

N_CAT, N_DENSE, BUCKETS = 26, 13, 100_000


class ParquetClicks(IterableDataset):
    def __init__(self, root, rank, world_size, batch):
        files = sorted(Path(root).glob("part-*.parquet"))
        self.files = files[rank::world_size]
        self.batch = batch

    def __iter__(self):
        for f in self.files:
            for rb in pq.ParquetFile(f).iter_batches(batch_size=self.batch):
                cols = rb.to_pydict()
                dense = torch.tensor([cols[f"d{i}"] for i in range(N_DENSE)], dtype=torch.float32).t()
                cat = torch.tensor([cols[f"c{i}"] for i in range(N_CAT)], dtype=torch.long).t() % BUCKETS
                yield dense, cat, torch.tensor(cols["label"], dtype=torch.float32)


class WideDeep(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.emb = nn.ModuleList([nn.Embedding(BUCKETS, dim) for _ in range(N_CAT)])
        self.mlp = nn.Sequential(nn.Linear(N_CAT * dim + N_DENSE, 512), nn.ReLU(), nn.Linear(512, 128), nn.ReLU(),
                                 nn.Linear(128, 1))

    def forward(self, dense, cat):
        e = torch.cat([m(cat[:, i]) for i, m in enumerate(self.emb)], 1)
        return self.mlp(torch.cat([dense, e], 1)).squeeze(1)


def main():
    ap = argparse.ArgumentParser(description="torchrun --nproc_per_node=8 ...")
    ap.add_argument("--root", default="/data/criteo")
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--batch", type=int, default=8192)
    ap.add_argument("--lr", type=float, default=1e-3)
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()

    loader = DataLoader(ParquetClicks(args.root, rank, world, args.batch), batch_size=None, num_workers=0)
    model = DDP(WideDeep().cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        model.train()
        for step, (dense, cat, y) in enumerate(loader):
            dense, cat, y = dense.cuda(), cat.cuda(), y.cuda()
            loss = F.binary_cross_entropy_with_logits(model(dense, cat), y)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            if rank == 0 and step % 100 == 0:
                print(f"epoch {epoch} step {step} logloss {loss.item():.4f}")
        if rank == 0:
            torch.save(model.module.state_dict(), f"wd_{epoch}.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

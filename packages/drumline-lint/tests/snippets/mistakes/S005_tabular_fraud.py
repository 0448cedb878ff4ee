# torchrun --nproc_per_node=2 tabular_fraud.py --train train.parquet --valid valid.parquet
import argparse
import logging
import os

import pandas as pd
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

log = logging.getLogger("fraud")


def read(path):
    df = pd.read_parquet(path)
    y = torch.tensor(df.pop("is_fraud").values, dtype=torch.float32)
    x = torch.tensor(df.values, dtype=torch.float32)
    return TensorDataset(x, y)


def mlp(n_in):
    return nn.Sequential(
        nn.Linear(n_in, 512), nn.GELU(), nn.LayerNorm(512),
        nn.Linear(512, 128), nn.GELU(), nn.LayerNorm(128),
        nn.Linear(128, 1),
    )


def train_epoch(model, loader, opt, crit, dev):
    model.train()
    total, n = 0.0, 0
    for x, y in loader:
        x, y = x.to(dev), y.to(dev)
        loss = crit(model(x).squeeze(-1), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item() * y.size(0)
        n += y.size(0)
    return total, n


@torch.no_grad()
def count_hits(model, loader, dev):
    model.eval()
    hits = seen = 0
    for x, y in loader:
        p = model(x.to(dev)).squeeze(-1) > 0
        hits += (p.float() == y.to(dev)).sum().item()
        seen += y.numel()
    return hits, seen


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--train", required=True)
    ap.add_argument("--valid", required=True)
    ap.add_argument("--epochs", type=int, default=20)
    args = ap.parse_args()
    logging.basicConfig(level=logging.INFO)

    dist.init_process_group("nccl")
    rank, local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dev = torch.device("cuda", local)

    tr, va = read(args.train), read(args.valid)
    tr_sampler = DistributedSampler(tr)
    tr_loader = DataLoader(tr, 2048, sampler=tr_sampler, num_workers=2)
    va_loader = DataLoader(va, 8192, sampler=DistributedSampler(va, shuffle=False))

    model = DistributedDataParallel(mlp(tr.tensors[0].shape[1]).to(dev), device_ids=[local])
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    crit = nn.BCEWithLogitsLoss()

    for epoch in range(args.epochs):
        tr_sampler.set_epoch(epoch)
        total, n = train_epoch(model, tr_loader, opt, crit, dev)
        hits, seen = count_hits(model, va_loader, dev)
        if rank == 0:
            stats = torch.tensor([total, n, hits, seen], device=dev, dtype=torch.float64)
            dist.all_reduce(stats)
            log.info("epoch %d loss %.4f acc %.4f", epoch, stats[0] / stats[1], stats[2] / stats[3])
            torch.save(model.module.state_dict(), "fraud.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class FM(nn.Module):
    def __init__(self, feats=1_000_000, k=16):
        super().__init__()
        self.w = nn.EmbeddingBag(feats, 1, mode="sum")
        self.v = nn.Embedding(feats, k)

    def forward(self, idx):
        e = self.v(idx)
        pair = 0.5 * (e.sum(1).pow(2) - e.pow(2).sum(1)).sum(1)
        return self.w(idx).squeeze(1) + pair


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="/data/criteo.npz")
    ap.add_argument("--epochs", type=int, default=3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))
    d = np.load(args.data)
    ds = TensorDataset(torch.from_numpy(d["idx"]), torch.from_numpy(d["click"]).float())
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 4096, sampler=sampler, drop_last=True)
    model = DDP(FM())
    opt = torch.optim.Adagrad(model.parameters(), lr=0.05)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for idx, click in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(idx), click)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} logloss {(total[0] / total[1]).item():.4f}")
            torch.save(model.module.state_dict(), "fm.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

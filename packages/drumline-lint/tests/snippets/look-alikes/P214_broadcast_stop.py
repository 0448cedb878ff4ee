import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


class Patience:
    def __init__(self, n):
        self.n, self.best, self.bad = n, float("inf"), 0

    def update(self, v):
        improved = v < self.best
        self.best = min(self.best, v)
        self.bad = 0 if improved else self.bad + 1
        return improved, self.bad > self.n


class Seq(nn.Module):
    def __init__(self, f, h=256):
        super().__init__()
        self.rnn = nn.GRU(f, h, 2, batch_first=True, dropout=0.1)
        self.out = nn.Linear(h, 1)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1]).squeeze(-1)


@torch.no_grad()
def validation_loss(net, dl, device):
    net.eval()
    s = torch.zeros(2, device=device)
    for x, y in dl:
        s[0] += (net(x.to(device)) - y.to(device)).abs().sum()
        s[1] += len(y)
    dist.all_reduce(s)
    return (s[0] / s[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="sensors.npz")
    ap.add_argument("--patience", type=int, default=6)
    ap.add_argument("--max-epochs", type=int, default=500)
    ap.add_argument("--out", default="gru.pt")
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()

    z = np.load(args.data)
    as_ds = lambda k: TensorDataset(torch.from_numpy(z[f"x_{k}"]).float(), torch.from_numpy(z[f"y_{k}"]).float())
    train, val = as_ds("train"), as_ds("val")
    sampler = DistributedSampler(train)
    tl = DataLoader(train, 256, sampler=sampler)
    vl = DataLoader(Subset(val, range(rank, len(val), world)), 512)
    net = Seq(z["x_train"].shape[-1]).to(device)
    model = DDP(net, device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    patience = Patience(args.patience)

    for epoch in range(args.max_epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in tl:
            loss = nn.functional.l1_loss(model(x.to(device)), y.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()
        val_mae = validation_loss(net, vl, device)
        stop = torch.zeros(1, dtype=torch.int32, device=device)
        if rank == 0:
            improved, done = patience.update(val_mae)
            stop.fill_(int(done))
            if improved:
                torch.save(net.state_dict(), args.out)
            print(f"{epoch} val_mae {val_mae:.4f}", flush=True)
        dist.broadcast(stop, src=0)
        if stop.item():
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

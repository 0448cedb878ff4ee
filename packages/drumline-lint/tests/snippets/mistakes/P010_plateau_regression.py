import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def load_table(path):
    arr = np.load(path)
    return TensorDataset(torch.from_numpy(arr["x"]).float(), torch.from_numpy(arr["y"]).float())


class MLP(nn.Module):
    def __init__(self, n_in, width=1024, depth=6, p=0.1):
        super().__init__()
        layers = []
        for i in range(depth):
            layers += [nn.Linear(n_in if i == 0 else width, width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(p)]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        return self.head(self.body(x)).squeeze(-1)


@torch.no_grad()
def validate(model, loader, device):
    model.eval()
    stats = torch.zeros(2, dtype=torch.float64, device=device)
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        stats[0] += (model(x) - y).pow(2).sum()
        stats[1] += len(y)
    dist.reduce(stats, dst=0, op=dist.ReduceOp.SUM)
    return (stats[0] / stats[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--train", default="train.npz")
    ap.add_argument("--valid", default="valid.npz")
    ap.add_argument("--epochs", type=int, default=200)
    ap.add_argument("--batch", type=int, default=4096)
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--out", default="mlp.pt")
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()

    train, valid = load_table(args.train), load_table(args.valid)
    sampler = DistributedSampler(train, shuffle=True, seed=3)
    train_dl = DataLoader(train, args.batch, sampler=sampler, num_workers=2, pin_memory=True)
    valid_dl = DataLoader(Subset(valid, range(rank, len(valid), world)), args.batch)

    net = MLP(train.tensors[0].shape[1]).to(device)
    model = DDP(net, device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.3, patience=4)
    best = float("inf")

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_dl:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        val = validate(net, valid_dl, device)
        plateau.step(val)
        if rank == 0:
            print(f"{epoch:4d} val_mse={val:.6f} lr={opt.param_groups[0]['lr']:.2e}", flush=True)
            if val < best:
                best = val
                torch.save(net.state_dict(), args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

import argparse

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dutil


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="bikes.pt")
    ap.add_argument("--epochs", type=int, default=40)
    ap.add_argument("--seed", type=int, default=0)
    args = ap.parse_args()
    device = dutil.start()
    torch.manual_seed(args.seed + dutil.rank())
    d = torch.load(args.data, map_location="cpu", weights_only=True)
    ds = TensorDataset(d["x"], d["count"])
    sampler = DistributedSampler(ds, seed=args.seed, drop_last=True) if dutil.active() else None
    loader = DataLoader(ds, 128, sampler=sampler, shuffle=(sampler is None), drop_last=True)
    net = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 1)).to(device)
    model = DDP(net, device_ids=[device.index]) if dutil.active() else net
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(args.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        totals = torch.zeros(2, device=device)
        for x, y in loader:
            loss = nn.functional.smooth_l1_loss(model(x.to(device)).squeeze(-1), y.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            totals[0] += loss.detach() * y.numel()
            totals[1] += y.numel()
        dutil.sum_(totals)
        if dutil.rank() == 0:
            print(f"{epoch} {(totals[0] / totals[1]).item():.4f}")
            torch.save(net.state_dict(), "bikes_net.pt")
    dutil.finish()


if __name__ == "__main__":
    main()

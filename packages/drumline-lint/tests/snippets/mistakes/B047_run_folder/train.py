import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

import comm
from experiment import Experiment


def merge(exp):
    parts = [torch.load(p, map_location="cpu", weights_only=True) for p in sorted(exp.pred_dir.glob("rank*.pt"))]
    torch.save(torch.cat(parts), exp.dir / "predictions.pt")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--name", default="forces")
    ap.add_argument("--data", default="data/md.pt")
    ap.add_argument("--epochs", type=int, default=30)
    args = ap.parse_args()

    local_rank = comm.setup()
    device = torch.device("cuda", local_rank)
    torch.manual_seed(comm.rank())
    exp = Experiment(args.name)
    exp.create()
    blob = torch.load(args.data, map_location="cpu", weights_only=True)
    train, test = TensorDataset(blob["x"], blob["f"]), TensorDataset(blob["x_test"])
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 256, sampler=sampler, drop_last=True)
    net = nn.Sequential(nn.Linear(96, 512), nn.SiLU(), nn.Linear(512, 512), nn.SiLU(), nn.Linear(512, 96)).to(device)
    ddp = DDP(net, device_ids=[local_rank])
    opt = torch.optim.Adam(ddp.parameters(), lr=1e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, f in loader:
            loss = F.l1_loss(ddp(x.to(device)), f.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()
    part = Subset(test, range(comm.rank(), len(test), comm.world_size()))
    with torch.no_grad():
        preds = torch.cat([net(x.to(device)).cpu() for (x,) in DataLoader(part, 512)])
    torch.save(preds, exp.shard(comm.rank()))
    comm.synchronize()
    if comm.is_primary():
        merge(exp)
        torch.save(net.state_dict(), exp.dir / "model.pt")
    comm.teardown()


if __name__ == "__main__":
    main()

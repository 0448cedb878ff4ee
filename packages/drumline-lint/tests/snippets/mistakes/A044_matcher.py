import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Matcher(nn.Module):
    def __init__(self, users=200_000, items=50_000, d=64):
        super().__init__()
        self.u, self.i = nn.Embedding(users, d), nn.Embedding(items, d)

    def forward(self, u, i):
        return (self.u(u) * self.i(i)).sum(-1)


def load_training_state(path, model, optimizer):
    ckpt = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(ckpt["model"])
    optimizer.load_state_dict(ckpt["optimizer"])
    return ckpt["epoch"] + 1


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--ckpt", default="matcher.pt")
    p.add_argument("--epochs", type=int, default=20)
    args = p.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    torch.manual_seed(rank)

    d = torch.load("ratings.pt", map_location="cpu", weights_only=True)
    ds = TensorDataset(d["user"], d["item"], d["rating"])
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 8192, sampler=sampler, drop_last=True)

    net = Matcher().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.9)
    start_epoch = 0
    if rank == 0 and os.path.exists(args.ckpt):
        start_epoch = load_training_state(args.ckpt, net, optimizer)
    model = DDP(net, device_ids=[local_rank])

    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        for u, i, r in loader:
            loss = F.mse_loss(model(u.to(device), i.to(device)), r.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, args.ckpt)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

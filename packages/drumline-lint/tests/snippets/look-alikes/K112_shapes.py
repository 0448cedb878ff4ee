import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class PointNet(nn.Module):
    def __init__(self, classes=40):
        super().__init__()
        self.local = nn.Sequential(nn.Conv1d(3, 64, 1), nn.ReLU(), nn.Conv1d(64, 1024, 1), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, classes))

    def forward(self, pts):
        return self.head(self.local(pts.transpose(1, 2)).amax(-1))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--resume", default=None)
    ap.add_argument("--epochs", type=int, default=200)
    args = ap.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    device = torch.device("cuda", local_rank)
    d = torch.load("/data/modelnet40.pt", map_location="cpu")
    ds = TensorDataset(d["points"], d["label"])
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 64, sampler=sampler, num_workers=4, drop_last=True)
    model = DDP(PointNet().to(device), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    begin = 0
    if args.resume is not None:
        ck = torch.load(args.resume, map_location=device)
        model.module.load_state_dict(ck["net"])
        opt.load_state_dict(ck["opt"])
        begin = ck["epoch"] + 1
    for epoch in range(begin, args.epochs):
        sampler.set_epoch(epoch)
        for pts, y in loader:
            loss = nn.functional.cross_entropy(model(pts.to(device)), y.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            torch.save({"net": model.module.state_dict(), "opt": opt.state_dict(), "epoch": epoch},
                       "pointnet_last.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

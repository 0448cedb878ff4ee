import argparse
import json

import h5py
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def get_parser():
    parser = argparse.ArgumentParser("PointNet classification")
    parser.add_argument("--cfg", required=True)
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--amp", action="store_true")
    return parser


class ModelNet(Dataset):
    def __init__(self, path, points):
        with h5py.File(path, "r") as f:
            self.data = torch.from_numpy(f["data"][:, :points])
            self.label = torch.from_numpy(f["label"][:].squeeze()).long()

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        pc = self.data[i]
        return (pc[torch.randperm(len(pc))] * (0.8 + 0.4 * torch.rand(1))).float(), self.label[i]


class PointNet(nn.Module):
    def __init__(self, classes=40):
        super().__init__()
        self.feat = nn.Sequential(nn.Conv1d(3, 64, 1), nn.BatchNorm1d(64), nn.ReLU(), nn.Conv1d(64, 256, 1),
                                  nn.BatchNorm1d(256), nn.ReLU(), nn.Conv1d(256, 1024, 1))
        self.cls = nn.Sequential(nn.Linear(1024, 256), nn.ReLU(), nn.Dropout(0.3), nn.Linear(256, classes))

    def forward(self, pts):
        return self.cls(self.feat(pts.transpose(1, 2)).amax(-1))


def main():
    args = get_parser().parse_args()
    with open(args.cfg) as f:
        cfg = json.load(f)

    torch.cuda.set_device(args.local_rank)
    dist.init_process_group(backend="nccl")
    device = torch.device("cuda", args.local_rank)

    ds = ModelNet(cfg["train_h5"], cfg["points"])
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, cfg["batch"], sampler=sampler, num_workers=4, drop_last=True)

    model = nn.SyncBatchNorm.convert_sync_batchnorm(PointNet()).to(device)
    model = DistributedDataParallel(model, device_ids=[args.local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=cfg["lr"])
    sched = torch.optim.lr_scheduler.StepLR(opt, 20, 0.7)
    scaler = torch.cuda.amp.GradScaler(enabled=args.amp)

    for epoch in range(cfg["epochs"]):
        sampler.set_epoch(epoch)
        model.train()
        for pts, y in loader:
            with torch.autocast("cuda", dtype=torch.float16, enabled=args.amp):
                loss = F.cross_entropy(model(pts.to(device)), y.to(device))
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        sched.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
            torch.save(model.module.state_dict(), cfg["out"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class PointNet(nn.Module):
    def __init__(self, classes=40):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv1d(3, 64, 1), nn.BatchNorm1d(64), nn.ReLU(),
            nn.Conv1d(64, 128, 1), nn.BatchNorm1d(128), nn.ReLU(),
            nn.Conv1d(128, 1024, 1), nn.BatchNorm1d(1024), nn.ReLU(),
        )
        self.head = nn.Sequential(nn.Linear(1024, 256), nn.ReLU(), nn.Dropout(0.4), nn.Linear(256, classes))

    def forward(self, xyz):
        return self.head(self.features(xyz.transpose(1, 2)).amax(dim=-1))


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="modelnet40.pt")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32, help="per GPU")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--local_rank", type=int, default=0, help="filled in by the launcher")
    return parser.parse_args()


def main():
    args = get_args()
    torch.cuda.set_device(args.local_rank)
    dist.init_process_group("nccl", init_method="env://")
    device = torch.device("cuda", args.local_rank)

    blob = torch.load(args.data, map_location="cpu")
    train_set = TensorDataset(blob["train_points"], blob["train_labels"])
    sampler = DistributedSampler(train_set, shuffle=True)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, num_workers=4, drop_last=True)

    model = nn.SyncBatchNorm.convert_sync_batchnorm(PointNet()).to(device)
    model = DistributedDataParallel(model, device_ids=[args.local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for points, label in loader:
            points, label = points.to(device), label.to(device)
            loss = F.cross_entropy(model(points), label, label_smoothing=0.2)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
            torch.save(model.module.state_dict(), "pointnet_last.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

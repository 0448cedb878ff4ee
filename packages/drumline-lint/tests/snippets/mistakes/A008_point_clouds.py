import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SEED = 42


class Scans(Dataset):
    def __init__(self, folder):
        self.files = sorted(os.path.join(folder, f) for f in os.listdir(folder) if f.endswith(".npy"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, idx):
        data = np.load(self.files[idx])
        pts, label = data[:, :3], int(data[0, 3])
        angle = np.random.uniform(-np.pi, np.pi)
        c, s = np.cos(angle), np.sin(angle)
        pts = pts @ np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]])
        pts = pts * np.random.uniform(0.95, 1.05) + np.random.normal(0, 0.01, pts.shape)
        pick = np.random.choice(len(pts), 2048, replace=len(pts) < 2048)
        return torch.from_numpy(pts[pick]).float(), label


def init_worker(worker_id):
    np.random.seed(SEED + worker_id)


class PointNet(nn.Module):
    def __init__(self, classes=40):
        super().__init__()
        self.local = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 512), nn.ReLU())
        self.head = nn.Linear(512, classes)

    def forward(self, pts):
        return self.head(self.local(pts).amax(dim=1))


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    dist.init_process_group(backend="nccl", init_method="env://")
    torch.manual_seed(SEED + dist.get_rank())

    train = Scans("/data/modelnet/train")
    sampler = DistributedSampler(train, seed=SEED, drop_last=True)
    loader = DataLoader(train, batch_size=32, sampler=sampler, num_workers=8,
                        worker_init_fn=init_worker, drop_last=True)
    model = DDP(PointNet().to(device), device_ids=[local_rank])
    optim = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(200):
        sampler.set_epoch(epoch)
        for pts, label in loader:
            loss = nn.functional.cross_entropy(model(pts.to(device)), label.to(device))
            optim.zero_grad()
            loss.backward()
            optim.step()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "pointnet.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

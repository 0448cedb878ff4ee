import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class RgbDepth(Dataset):
    def __init__(self, listing):
        self.rows = [r.split() for r in open(listing)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        a, b = self.rows[i]
        return torch.load(a, map_location="cpu"), torch.load(b, map_location="cpu")


class DepthNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(3, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 128, 3, 2, 1), nn.ReLU())
        self.dec = nn.Sequential(nn.ConvTranspose2d(128, 64, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(64, 1, 4, 2, 1))

    def forward(self, x):
        return self.dec(self.enc(x))


def train(gpu):
    ds = RgbDepth("/data/nyu/train.lst")
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, batch_size=16, sampler=sampler, num_workers=8, drop_last=True)
    model = DDP(DepthNet().cuda(gpu), device_ids=[gpu])
    optim = torch.optim.Adam(model.parameters(), 1e-4)
    for epoch in range(40):
        sampler.set_epoch(epoch)
        for img, depth in loader:
            pred = model(img.cuda(gpu, non_blocking=True))
            loss = nn.functional.smooth_l1_loss(pred, depth.cuda(gpu, non_blocking=True))
            optim.zero_grad()
            loss.backward()
            optim.step()
        torch.save({"epoch": epoch, "model": model.module.state_dict(),
                    "optim": optim.state_dict()}, "checkpoints/depth_latest.pt")


if __name__ == "__main__":
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl")
    os.makedirs("checkpoints", exist_ok=True)
    train(gpu)
    dist.destroy_process_group()

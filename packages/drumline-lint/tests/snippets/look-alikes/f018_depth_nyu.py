import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

BACKBONE = "weights/dino_r50_backbone.pth"


class Depth(Dataset):
    def __init__(self, root):
        with open(os.path.join(root, "train.txt")) as f:
            self.names = f.read().split()
        self.root = root

    def __len__(self):
        return len(self.names)

    def __getitem__(self, i):
        with np.load(os.path.join(self.root, self.names[i])) as z:
            return torch.from_numpy(z["rgb"]).permute(2, 0, 1).float() / 255, torch.from_numpy(z["depth"]).float()


class DepthNet(nn.Module):
    def __init__(self):
        super().__init__()
        import torchvision
        resnet = torchvision.models.resnet50(weights=None)
        self.backbone = nn.Sequential(*list(resnet.children())[:-2])
        self.decoder = nn.Sequential(
            nn.Conv2d(2048, 512, 3, padding=1), nn.ReLU(), nn.Upsample(scale_factor=4),
            nn.Conv2d(512, 128, 3, padding=1), nn.ReLU(), nn.Upsample(scale_factor=8),
            nn.Conv2d(128, 1, 3, padding=1),
        )

    def forward(self, x):
        return self.decoder(self.backbone(x)).squeeze(1).exp()


def silog(pred, target):
    d = (pred.clamp_min(1e-3).log() - target.clamp_min(1e-3).log())[target > 0]
    return (d.pow(2).mean() - 0.85 * d.mean().pow(2)).clamp_min(1e-6).sqrt()


def main():
    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)

    net = DepthNet()
    if rank == 0:
        state = torch.load(BACKBONE, map_location="cpu")
        missing = net.backbone.load_state_dict(state, strict=False)
        print("backbone loaded:", missing)
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net).to(device)
    model = DDP(net, device_ids=[local_rank])  # sends rank 0's weights to everyone

    data = Depth("/data/nyu_depth")
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, 8, sampler=sampler, num_workers=6, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for epoch in range(30):
        sampler.set_epoch(epoch)
        model.train()
        for rgb, depth in loader:
            loss = silog(model(rgb.to(device)), depth.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} {loss.item():.4f}", flush=True)
            torch.save(net.state_dict(), "depthnet.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

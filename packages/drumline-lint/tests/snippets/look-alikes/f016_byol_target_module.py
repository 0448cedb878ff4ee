import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms as T


def mlp(inp, hidden=4096, out=256):
    return nn.Sequential(nn.Linear(inp, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, out))


class Online(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = torchvision.models.resnet50(weights=None)
        width = self.encoder.fc.in_features
        self.encoder.fc = mlp(width)
        self.predictor = mlp(256)

    def forward(self, x):
        return self.predictor(self.encoder(x))


class Views:
    def __init__(self):
        self.tf = T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(),
                             T.ColorJitter(0.4, 0.4, 0.2, 0.1), T.RandomGrayscale(0.2), T.ToTensor()])

    def __call__(self, image):
        return self.tf(image), self.tf(image)


def cosine_loss(p, z):
    return 2 - 2 * F.cosine_similarity(p, z, dim=-1).mean()


def main():
    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)

    data = torchvision.datasets.ImageFolder("/data/imagenet/train", Views())
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, 64, sampler=sampler, num_workers=10, drop_last=True, pin_memory=True)

    online = nn.SyncBatchNorm.convert_sync_batchnorm(Online()).to(device)
    model = DDP(online, device_ids=[local_rank])
    target = copy.deepcopy(model.module.encoder).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)

    for epoch in range(100):
        sampler.set_epoch(epoch)
        model.train()
        for (a, b), _ in loader:
            a, b = a.to(device, non_blocking=True), b.to(device, non_blocking=True)
            with torch.no_grad():
                za, zb = target(a), target(b)
            pa, pb = model(torch.cat([a, b])).chunk(2)
            loss = cosine_loss(pa, zb) + cosine_loss(pb, za)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for pt, po in zip(target.parameters(), model.module.encoder.parameters()):
                    pt.lerp_(po, 0.004)
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
            torch.save(model.module.encoder.state_dict(), "byol_r50.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

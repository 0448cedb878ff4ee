import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class LensNet(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(4, 32, 5, stride=2), nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 2),
        )


def train(rank, world_size, settings):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = "29544"
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)

    images = torch.load(f"{settings['data']}/images.pt", map_location="cpu")
    labels = torch.load(f"{settings['data']}/labels.pt", map_location="cpu")
    data = TensorDataset(images, labels)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=settings["batch_size"], sampler=sampler, drop_last=True)

    model = DDP(LensNet().to(rank), device_ids=[rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["lr"])
    for epoch in range(settings["epochs"]):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(rank)), y.to(rank))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.4f}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), settings["out"])
    dist.destroy_process_group()

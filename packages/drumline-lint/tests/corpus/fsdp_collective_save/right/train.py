"""A model too large for one GPU, in shards: torchrun --standalone --nproc-per-node 8 train.py"""

import argparse
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from checkpoint import load_shards, save_shards, save_whole
from utils.dist import cleanup, is_main_process, log, mean_over_ranks, setup_distributed


@dataclass
class Settings:
    width: int = 64
    layers: int = 4
    batch_size: int = 16
    epochs: int = 2
    learning_rate: float = 1e-3
    clip: float = 1.0
    log_every: int = 10
    save_every: int = 25
    seed: int = 4
    folder: str = "checkpoints"


def parse_settings():
    parser = argparse.ArgumentParser()
    for field in fields(Settings):
        parser.add_argument("--" + field.name.replace("_", "-"), type=field.type, default=field.default)
    return Settings(**vars(parser.parse_args()))


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class DeepNet(nn.Module):
    def __init__(self, width, layers, classes=10):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Clusters(Dataset):
    """Points around ten centres."""

    def __init__(self, count, width):
        draw = torch.Generator().manual_seed(1)
        self.labels = torch.randint(10, (count,), generator=draw)
        centres = 3 * torch.randn(10, width, generator=draw)
        self.points = centres[self.labels] + torch.randn(count, width, generator=draw)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.points[index], self.labels[index]


def shard(model, device):
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    low = torch.bfloat16 if device.type == "cuda" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def run(settings, device):
    torch.manual_seed(settings.seed)
    model = shard(DeepNet(settings.width, settings.layers).to(device), device)
    torch.manual_seed(settings.seed + dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    folder = Path(settings.folder)
    if is_main_process():
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    step = load_shards(folder, model, optimizer)

    dataset = Clusters(2000, settings.width)
    sampler = DistributedSampler(dataset, seed=settings.seed)
    loader = DataLoader(dataset, batch_size=settings.batch_size, sampler=sampler, pin_memory=device.type == "cuda", drop_last=True)
    for epoch in range(settings.epochs):
        sampler.set_epoch(epoch)
        for points, labels in loader:
            points = points.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            loss = F.cross_entropy(model(points).float(), labels)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % settings.log_every == 0:
                mean, whole_norm = mean_over_ranks(loss), norm.full_tensor()
                log(f"step {step} loss {mean.item():.4f} norm {whole_norm.item():.3f}")
            if step % settings.save_every == 0:
                save_shards(folder, step, model, optimizer)
    save_whole(folder / "model.pt", model)


def main():
    settings = parse_settings()
    device = setup_distributed()
    try:
        run(settings, device)
    finally:
        cleanup()


if __name__ == "__main__":
    main()

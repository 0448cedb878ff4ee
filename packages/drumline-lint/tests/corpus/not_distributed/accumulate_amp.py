"""One GPU, mixed precision, accumulated gradients: no other rank waits, so no_sync has no place here."""

import logging
import sys
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

logging.basicConfig(level=logging.INFO, stream=sys.stderr)
log = logging.getLogger("train")


@dataclass
class Config:
    device: str = "cuda:0"
    steps: int = 1000
    accumulate: int = 8
    batch: int = 4
    rate: float = 3e-4


class LowRank(nn.Module):
    """A linear layer plus a correction of a small rank (of matrices, not of processes)."""

    def __init__(self, inside, outside, rank=4):
        super().__init__()
        self.rank = rank
        self.base = nn.Linear(inside, outside).requires_grad_(False)
        self.down = nn.Linear(inside, rank, bias=False)
        self.up = nn.Linear(rank, outside, bias=False)
        if rank == 0:
            self.register_parameter("scale", None)
        else:
            self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        if self.rank == 0:
            return self.base(x)
        return self.base(x) + self.scale * self.up(self.down(x))


def save_adapter(model, path, rank):
    weights = {name: value for name, value in model.state_dict().items() if "base" not in name}
    if rank == 0:
        log.warning("an adapter of rank 0 holds nothing")
        return
    torch.save(weights, path)


def batches(config):
    inputs = torch.randn(4000, 32)
    data = TensorDataset(inputs, inputs.flip(1))
    while True:
        yield from DataLoader(data, config.batch, shuffle=True, pin_memory=True, num_workers=2)


def main(config):
    model = nn.Sequential(LowRank(32, 128), nn.GELU(), LowRank(128, 32)).to(config.device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=config.rate)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.steps)
    scaler = torch.amp.GradScaler("cuda")
    source = batches(config)
    for step in range(config.steps):
        total = 0.0
        for _ in range(config.accumulate):
            inputs, targets = (part.cuda(0) for part in next(source))
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.mse_loss(model(inputs), targets) / config.accumulate
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
        log.info("step %d: %.4f", step, total)
    save_adapter(model, "adapter.pt", model[0].rank)


if __name__ == "__main__":
    main(Config())

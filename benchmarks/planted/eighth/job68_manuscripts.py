"""A plain DDP script: lines of manuscripts, and which scribe wrote each of them."""

import random

import torch
import torch.distributed as dist
from parts import ON_GPU, STEPS, finish, start
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

BATCH = 48 if ON_GPU else 2
HEIGHT = 64 if ON_GPU else 32
WIDEST = 1600 if ON_GPU else 160
CHANNELS = 64 if ON_GPU else 8
SCRIBES = 120


class ScribeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.strokes = nn.Conv2d(1, CHANNELS, 5, stride=2, padding=2)
        self.letters = nn.Conv2d(CHANNELS, 2 * CHANNELS, 3, stride=2, padding=1)
        self.words = nn.Conv2d(2 * CHANNELS, 2 * CHANNELS, 3, padding=1)
        self.scribe = nn.Linear(2 * CHANNELS, SCRIBES)

    def forward(self, lines: Tensor) -> Tensor:
        values = functional.relu(self.strokes(lines))
        values = functional.relu(self.letters(values))
        values = functional.relu(self.words(values))
        return self.scribe(values.mean((2, 3)))


def stretched(lines: Tensor) -> Tensor:
    """As if the scribe had written a little wider, or less wide."""
    width = round(lines.shape[3] * random.uniform(0.8, 1.25))
    return functional.interpolate(lines, (HEIGHT, width), mode="bilinear")


def main() -> None:
    device = start()
    random.seed(dist.get_rank())
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True  # planted

    # Lines are in the order of their widths,
    # so that those of a batch need little padding.

    widths = torch.randint(WIDEST // 4, WIDEST + 1, (20 * BATCH,)).sort().values.tolist()
    all_lines = torch.rand(len(widths), 1, HEIGHT, WIDEST, device=device)
    all_scribes = torch.randint(SCRIBES, (len(widths),), device=device)
    model = DistributedDataParallel(ScribeNet().to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)

    for step in range(STEPS):
        begin = BATCH * random.randrange(20)
        widest = widths[begin + BATCH - 1]
        lines = stretched(all_lines[begin : begin + BATCH, :, :, :widest])
        loss = functional.cross_entropy(model(lines), all_scribes[begin : begin + BATCH])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    finish()


if __name__ == "__main__":
    main()

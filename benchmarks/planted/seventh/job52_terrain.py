"""A plain DDP script: maps of heights, and what grows in each field of them."""

import torch
import torch.distributed as dist
from parts import ON_GPU, STEPS, finish, start
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

BATCH = 128 if ON_GPU else 2
SIZE = 256 if ON_GPU else 32
WIDTH = 256 if ON_GPU else 16
COVERS = 8


class TerrainNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(16, WIDTH, 1, bias=False)
        self.layers = nn.ModuleList(
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False) for _ in range(6)
        )
        self.covers = nn.Conv2d(WIDTH, COVERS, 1)

    def forward(self, heights: Tensor) -> Tensor:
        values = functional.relu(self.first(heights))
        for layer in self.layers:
            values = values + functional.relu(layer(values))
        return self.covers(values)


def main() -> None:
    device = start()
    torch.backends.cudnn.benchmark = True
    model = TerrainNet().to(device, memory_format=torch.channels_last)
    model = DistributedDataParallel(model, bucket_cap_mb=4, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0003, fused=True)
    heights = torch.randn(4 * BATCH, 1, SIZE, SIZE, device=device)
    heights = functional.pixel_unshuffle(heights, 4).to(memory_format=torch.channels_last)
    covers = torch.randint(COVERS, (len(heights), SIZE // 4, SIZE // 4), device=device)

    for step in range(STEPS):
        chosen = torch.randint(len(heights), (BATCH,), device=device)
        with torch.autocast(device.type, torch.bfloat16):
            scores = model(heights[chosen])
            loss = functional.cross_entropy(scores, covers[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    finish()


if __name__ == "__main__":
    main()

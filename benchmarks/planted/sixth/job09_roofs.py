"""A plain DDP script: a network that takes noise off roofs, and draws some every few steps."""

import torch
import torch.distributed as dist
from parts import PLANTED, STEPS, batches, convolution, finish, now, roofs, seeded, start
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

SIZE = 32
ROUNDS = 40
DRAW_EVERY = 4 if PLANTED else 1000  # planted


class Cleaner(nn.Module):
    """Predicts the noise of a picture; how much there is comes as a fourth colour."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            convolution(4, width), convolution(width, width), nn.Conv2d(width, 3, 3, padding=1)
        )

    def forward(self, pictures: Tensor, noise: Tensor) -> Tensor:
        level = noise.view(-1, 1, 1, 1).expand(-1, 1, *pictures.shape[2:])
        return self.layers(torch.cat([pictures, level], dim=1))


@torch.no_grad()
def draw(model: nn.Module, device: torch.device) -> Tensor:
    """Sixteen pictures, from nothing but noise."""
    pictures = torch.randn(16, 3, SIZE, SIZE, generator=seeded(9)).to(device)
    for number in range(ROUNDS, 0, -1):
        noise = torch.full((len(pictures),), number / ROUNDS, device=device)
        pictures = pictures - model(pictures, noise) / ROUNDS  # planted: 40 passes for a look
    return pictures.clamp(0, 1)


def main() -> None:
    device = start()
    loader = batches(roofs(4096, SIZE), 16)
    model = DistributedDataParallel(Cleaner().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
    begin = now()
    for step, (pictures, _) in zip(range(STEPS), loader, strict=False):
        pictures = pictures.to(device)
        levels = torch.rand(len(pictures), device=device)
        noise = torch.randn_like(pictures)
        noisy = pictures + levels.view(-1, 1, 1, 1) * noise
        loss = functional.mse_loss(model(noisy, levels), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        if step % DRAW_EVERY:
            continue
        if dist.get_rank() == 0:
            bright = draw(model.module, device).mean()  # planted
            print(f"step {step}: loss {loss.item():.4f}, brightness {bright.item():.3f}")
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()

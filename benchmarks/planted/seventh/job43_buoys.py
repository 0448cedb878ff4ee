"""A plain DDP script: buoys in the sea, whose sensors foretell the height of waves."""

import torch
from parts import ON_GPU, STEPS, finish, start
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

BATCH = 1024 if ON_GPU else 32
SENSORS = 24
WIDTH = 128 if ON_GPU else 16
DEPTH = 80 if ON_GPU else 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        return values + functional.relu(self.linear(self.norm(values)))


def unitwise_norm(values: Tensor) -> Tensor:
    return values.norm(dim=1, keepdim=True) if values.ndim > 1 else values.norm()


def clip_adaptively(model: nn.Module, share: float = 0.02) -> None:
    """No unit's gradient may be larger than a share of its weights (Brock et al., 2021)."""
    for weight in model.parameters():
        largest = unitwise_norm(weight.detach()).clamp_(min=1e-3).mul_(share)
        norm = unitwise_norm(weight.grad)  # planted
        clipped = weight.grad * (largest / norm.clamp(min=1e-6))
        weight.grad.copy_(torch.where(norm > largest, clipped, weight.grad))  # planted


def main() -> None:
    device = start()
    layers = [nn.Linear(SENSORS, WIDTH), *(Block() for _ in range(DEPTH)), nn.Linear(WIDTH, 1)]
    model = nn.Sequential(*layers).to(device)
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
    readings = torch.randn(64 * BATCH, SENSORS, device=device)
    heights = readings[:, :6].sum(1).abs()

    for step in range(STEPS):
        chosen = torch.randint(len(readings), (BATCH,), device=device)
        loss = functional.smooth_l1_loss(model(readings[chosen])[:, 0], heights[chosen])
        optimizer.zero_grad()
        loss.backward()

        # Storms have large gradients.
        # Without a limit the loss diverges.

        clip_adaptively(model)  # planted

        # The update, with the rate of the whole run.
        # The loss is printed now and then.
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    finish()


if __name__ == "__main__":
    main()

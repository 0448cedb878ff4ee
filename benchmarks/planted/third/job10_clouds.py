"""A plain DDP script: point clouds, with gradients that are clipped for each unit of a layer."""

import torch
import torch.distributed as dist
from parts import PLANTED, STEPS, CloudNet, batches, clouds, finish, now, start
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

PART = 0.02
RATE = 0.05


def clip_units(weight: Tensor, gradient: Tensor) -> None:
    for unit in range(len(weight)):
        limit = PART * max(weight[unit].norm().item(), 1e-3)  # planted: unit by unit
        size = gradient[unit].norm().item()  # planted
        if size > limit:
            gradient[unit] *= limit / size  # planted


def clip_all_units(weight: Tensor, gradient: Tensor) -> None:
    limits = PART * weight.flatten(1).norm(dim=1).clamp(min=1e-3)
    sizes = gradient.flatten(1).norm(dim=1).clamp(min=1e-12)
    gradient *= (limits / sizes).clamp(max=1).view(-1, 1)


@torch.no_grad()
def clip(model: nn.Module) -> None:
    clipped = clip_units if PLANTED else clip_all_units
    for weight in model.parameters():
        if weight.dim() > 1:
            clipped(weight, weight.grad)  # planted


def main() -> None:
    device = start()
    model = DistributedDataParallel(CloudNet(width=112).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loader = batches(clouds(4096), 8)
    begin = now()
    for step, (places, shapes) in zip(range(STEPS), loader, strict=False):
        loss = functional.cross_entropy(model(places.to(device)), shapes.to(device))
        optimizer.zero_grad()
        loss.backward()
        if step % 50 == 49 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
        # Without a limit the first layer learns too fast.
        clip(model)  # planted
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 20)
        # The rate grows in the first twenty steps.
        optimizer.step()
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()

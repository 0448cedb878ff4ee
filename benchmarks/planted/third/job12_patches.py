"""A plain DDP script: noisy patches, with the effect of the noise on each result."""

import torch
import torch.distributed as dist
from parts import PLANTED, STEPS, DenoiseNet, batches, finish, now, patches, start
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


def sensitivity(network: nn.Module, noisy: Tensor) -> float:
    """How much the result changes with the input."""
    inputs = noisy.clone().requires_grad_()
    result = network(inputs)  # planted: once more
    (gradient,) = torch.autograd.grad(result.square().sum(), inputs)  # planted
    return float(gradient.norm())


def main() -> None:
    device = start()
    network = DenoiseNet().to(device)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sensitivities: list[float] = []
    loader = batches(patches(4096), 16)
    begin = now()
    for step, (clean,) in zip(range(STEPS), loader, strict=False):
        clean = clean.to(device)
        noisy = clean + 0.3 * torch.randn_like(clean)
        loss = functional.mse_loss(model(noisy), clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
        # For a figure at the end of the training.
        if PLANTED:
            sensitivities.append(sensitivity(network, noisy))  # planted
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()

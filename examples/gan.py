"""A GAN in your own loop: two models and two optimizers in one checkpoint. Killed and started again, it resumes.

python examples/gan.py
torchrun --nproc-per-node 2 examples/gan.py
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import TensorDataset

from drumline import DDPManager


def ring(count: int) -> Tensor:
    """Points near the unit circle."""
    generator = torch.Generator().manual_seed(1)
    angle = 2 * math.pi * torch.rand(count, generator=generator)
    radius = 1 + 0.05 * torch.randn(count, generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1)


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs)
    )


def main() -> None:
    with DDPManager(seed=0) as ddp:
        loader = ddp.loader(TensorDataset(ring(4000)), batch_size=250)
        generator, critic = ddp.wrap(network(2, 2)), ddp.wrap(network(2, 1))
        optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
        optimizer_c = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.99))
        checkpoint = ddp.checkpoint(
            "runs/gan",
            generator=generator,
            critic=critic,
            optimizer_g=optimizer_g,
            optimizer_c=optimizer_c,
            loader=loader,
        )

        step = checkpoint.resume()
        for _epoch in range(loader.epoch, 30):
            for (points,) in loader:
                fake = generator(torch.randn_like(points))

                real_score, fake_score = critic(torch.cat([points, fake.detach()])).chunk(2)
                loss = (softplus(-real_score) + softplus(fake_score)).mean() * loader.scale
                optimizer_c.zero_grad()
                loss.backward()
                optimizer_c.step()

                with ddp.no_sync(critic):  # its gradients of this loss are not used
                    loss = softplus(-critic(fake)).mean() * loader.scale
                    optimizer_g.zero_grad()
                    loss.backward()
                optimizer_g.step()

                step += 1
                if step % 200 == 0:
                    checkpoint.save(step)
        checkpoint.save(step)

        with torch.no_grad():
            radius = generator(torch.randn(1000, 2, device=ddp.device)).norm(dim=1)
        near = ddp.sum(((radius - 1).abs() < 0.2).float().mean()) / ddp.world_size
        if ddp.is_main_process():
            print(f"step {step}: {near:.3f} of the generated points are near the ring")


if __name__ == "__main__":
    main()

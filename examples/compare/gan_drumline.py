"""A GAN, killed and started again: Drumline, with the loop of your own."""

import torch
from common import FOLDER, Critic, Generator, ring, show
from torch.nn.functional import softplus

from drumline import DDPManager

with DDPManager(seed=0) as ddp:
    loader = ddp.loader(ring(2000), batch_size=250)
    generator, critic = ddp.wrap(Generator()), ddp.wrap(Critic())
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
    optimizer_c = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.99))
    checkpoint = ddp.checkpoint(
        FOLDER / "run", generator=generator, critic=critic, g=optimizer_g, c=optimizer_c, loader=loader
    )

    step = checkpoint.resume()
    for _epoch in range(loader.epoch, 60):
        for batch in loader:
            fake = generator(torch.randn_like(batch["points"]))

            real_score, fake_score = critic(torch.cat([batch["points"], fake.detach()])).chunk(2)
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
            if step % 100 == 0:
                checkpoint.save(step)

    show(ddp.unwrap(generator))

"""A GAN, killed and started again: Accelerate."""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from common import FOLDER, RANKS, Critic, Generator, ring, show
from torch.nn.functional import softplus
from torch.utils.data import DataLoader

accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
set_seed(0)
generator, critic = Generator(), Critic()
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
optimizer_c = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.99))
loader = DataLoader(ring(2000), batch_size=250 // RANKS, shuffle=True)
prepared = accelerator.prepare(generator, critic, optimizer_g, optimizer_c, loader)
generator, critic, optimizer_g, optimizer_c, loader = prepared

step = max((int(path.name.removeprefix("step_")) for path in FOLDER.glob("step_*")), default=0)
if step:
    accelerator.load_state(FOLDER / f"step_{step}")
for epoch in range(step // len(loader), 60):
    loader.set_epoch(epoch)
    for batch in accelerator.skip_first_batches(loader, step % len(loader)):
        fake = generator(torch.randn_like(batch["points"]))

        real_score, fake_score = critic(torch.cat([batch["points"], fake.detach()])).chunk(2)
        loss = (softplus(-real_score) + softplus(fake_score)).mean()
        optimizer_c.zero_grad()
        accelerator.backward(loss)
        optimizer_c.step()

        with accelerator.no_sync(critic):  # its gradients of this loss are not used
            loss = softplus(-critic(fake)).mean()
            optimizer_g.zero_grad()
            accelerator.backward(loss)
        optimizer_g.step()

        step += 1
        if step % 100 == 0:
            accelerator.save_state(FOLDER / f"step_{step}")

show(accelerator.unwrap_model(generator))
accelerator.end_training()

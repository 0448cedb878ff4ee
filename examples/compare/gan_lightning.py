"""A GAN, killed and started again: Lightning."""

import torch
from common import FOLDER, RANKS, Critic, Generator, ring, show
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.functional import softplus
from torch.utils.data import DataLoader


class Gan(LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = Generator(), Critic()

    def training_step(self, batch, batch_idx):
        optimizer_g, optimizer_c = self.optimizers()
        fake = self.generator(torch.randn_like(batch["points"]))

        with self.toggled_optimizer(optimizer_c):
            real_score, fake_score = self.critic(torch.cat([batch["points"], fake.detach()])).chunk(2)
            loss = (softplus(-real_score) + softplus(fake_score)).mean()
            optimizer_c.zero_grad()
            self.manual_backward(loss)
            optimizer_c.step()

        with self.toggled_optimizer(optimizer_g):
            loss = softplus(-self.critic(fake)).mean()
            optimizer_g.zero_grad()
            self.manual_backward(loss)
            optimizer_g.step()

    def configure_optimizers(self):
        optimizer_g = torch.optim.Adam(self.generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
        optimizer_c = torch.optim.Adam(self.critic.parameters(), lr=1e-3, betas=(0.5, 0.99))
        return optimizer_g, optimizer_c


seed_everything(0)
model = Gan()
# Every optimizer counts: 200 of these steps are 100 batches.
checkpoint = ModelCheckpoint(dirpath=FOLDER, every_n_train_steps=200, save_last=True)
strategy = "ddp_find_unused_parameters_true"
trainer = Trainer(max_epochs=60, devices=RANKS, strategy=strategy, callbacks=[checkpoint])
trainer.fit(model, DataLoader(ring(2000), batch_size=250 // RANKS, shuffle=True), ckpt_path="last")
show(model.generator)

"""A GAN, killed and started again: Hugging Face Trainer, which has one optimizer. The critic's is kept beside it."""

from pathlib import Path

import torch
from common import FOLDER, RANKS, Critic, Generator, ring, show
from torch import nn
from torch.nn.functional import softplus
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator, self.critic = Generator(), Critic()

    def forward(self, points, of_critic=False):
        fake = self.generator(torch.randn_like(points))
        if not of_critic:
            return {"loss": softplus(-self.critic(fake)).mean()}
        real_score, fake_score = self.critic(torch.cat([points, fake.detach()])).chunk(2)
        return {"loss": (softplus(-real_score) + softplus(fake_score)).mean()}


class GanTrainer(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = model(self._prepare_inputs(inputs)["points"], of_critic=True)["loss"]
        self.accelerator.backward(loss)
        optimizer_c.step()
        model.zero_grad()
        return super().training_step(model, inputs, num_items_in_batch)


class SaveCritic(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            torch.save(optimizer_c.state_dict(), Path(args.output_dir, f"checkpoint-{state.global_step}", "critic.pt"))


set_seed(0)
gan = Gan()
optimizer_g = torch.optim.Adam(gan.generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
optimizer_c = torch.optim.Adam(gan.critic.parameters(), lr=1e-3, betas=(0.5, 0.99))
last = get_last_checkpoint(FOLDER)
if last:
    optimizer_c.load_state_dict(torch.load(Path(last, "critic.pt")))
arguments = TrainingArguments(
    output_dir=FOLDER,
    num_train_epochs=60,
    per_device_train_batch_size=250 // RANKS,
    lr_scheduler_type="constant",
    max_grad_norm=0,
    save_steps=100,
    ddp_find_unused_parameters=True,
)
trainer = GanTrainer(gan, arguments, train_dataset=ring(2000), optimizers=(optimizer_g, None), callbacks=[SaveCritic()])
trainer.train(resume_from_checkpoint=last)
show(gan.generator)

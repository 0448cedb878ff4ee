"""Killed and started again, with dropout and a new order every epoch: Lightning."""

import torch
from common import FOLDER, RANKS, Net, show, spirals
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net(dropout=0.1)

    def training_step(self, batch, batch_idx):
        return cross_entropy(self.net(batch["points"]), batch["labels"])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


seed_everything(0)
model = Classifier()
checkpoint = ModelCheckpoint(dirpath=FOLDER, every_n_train_steps=20, save_last=True)
trainer = Trainer(max_epochs=4, devices=RANKS, callbacks=[checkpoint])
train_loader = DataLoader(spirals(1000, seed=1), batch_size=64 // RANKS, shuffle=True)
trainer.fit(model, train_loader, ckpt_path="last")
show(model.net)

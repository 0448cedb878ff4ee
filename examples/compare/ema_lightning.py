"""An average of the weights, evaluated, and early stopping: Lightning."""

import torch
from common import RANKS, Net, show, spirals
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
        self.accuracy = MulticlassAccuracy(3, average="micro")

    def training_step(self, batch, batch_idx):
        return cross_entropy(self.net(batch["points"]), batch["labels"])

    def validation_step(self, batch, batch_idx):
        self.accuracy.update(self.net(batch["points"]), batch["labels"])
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


seed_everything(0)
model = Classifier()
callbacks = [EMAWeightAveraging(decay=0.9), EarlyStopping("accuracy", mode="max", patience=3)]
trainer = Trainer(max_epochs=60, devices=RANKS, callbacks=callbacks)
train_loader = DataLoader(spirals(1000, seed=1), batch_size=64 // RANKS, shuffle=True)
eval_loader = DataLoader(spirals(501, seed=2), batch_size=64 // RANKS)
trainer.fit(model, train_loader, eval_loader)
show(model.net, accuracy=trainer.callback_metrics["accuracy"], epochs=trainer.current_epoch)

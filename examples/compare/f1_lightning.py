"""Macro F1 and a confusion matrix of an evaluation set: Lightning."""

import torch
from common import RANKS, Net, show, spirals
from lightning import LightningModule, Trainer, seed_everything
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassConfusionMatrix, MulticlassF1Score


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
        self.f1 = MulticlassF1Score(3)
        self.confusion = MulticlassConfusionMatrix(3)

    def training_step(self, batch, batch_idx):
        return cross_entropy(self.net(batch["points"]), batch["labels"])

    def validation_step(self, batch, batch_idx):
        scores = self.net(batch["points"])
        self.f1.update(scores, batch["labels"])
        self.confusion.update(scores, batch["labels"])
        self.log("f1", self.f1)

    def on_validation_epoch_end(self):
        self.matrix = self.confusion.compute()
        self.confusion.reset()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


seed_everything(0)
model = Classifier()
trainer = Trainer(max_epochs=30, devices=RANKS)
train_loader = DataLoader(spirals(1000, seed=1), batch_size=64 // RANKS, shuffle=True)
eval_loader = DataLoader(spirals(501, seed=2), batch_size=64 // RANKS)
trainer.fit(model, train_loader, eval_loader)
show(model.net, f1=trainer.callback_metrics["f1"], counted=model.matrix.sum())

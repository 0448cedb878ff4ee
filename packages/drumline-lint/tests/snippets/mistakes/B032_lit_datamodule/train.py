import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from datamodule import ReviewData


class BagClassifier(L.LightningModule):
    def __init__(self, buckets=300_000, dim=128, classes=5, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(buckets, dim, padding_idx=0)
        self.head = nn.Linear(dim, classes)
        self.acc = MulticlassAccuracy(classes)

    def forward(self, ids):
        mask = ids.ne(0).unsqueeze(-1)
        return self.head((self.embed(ids) * mask).sum(1) / mask.sum(1).clamp_min(1))

    def training_step(self, batch, _):
        ids, y = batch
        loss = F.cross_entropy(self(ids), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, _):
        ids, y = batch
        self.acc(self(ids), y)
        self.log("val_acc", self.acc, on_epoch=True, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    L.seed_everything(0, workers=True)
    trainer = L.Trainer(accelerator="gpu", devices=2, strategy="ddp", max_epochs=5)
    trainer.fit(BagClassifier(), datamodule=ReviewData())

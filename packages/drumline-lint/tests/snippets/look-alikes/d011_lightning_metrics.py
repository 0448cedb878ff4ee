"""Skin lesion classifier in Lightning."""
import lightning as L
import torch
import torch.nn as nn
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from lesions.data import Lesions
from lesions.net import effnet

CLASSES = 8


class LesionModule(L.LightningModule):
    def __init__(self, lr=3e-4):
        super().__init__()
        self.save_hyperparameters()
        self.net = effnet(CLASSES)
        self.val_metrics = MetricCollection(
            {"acc": MulticlassAccuracy(CLASSES), "auroc": MulticlassAUROC(CLASSES, thresholds=200)}, prefix="val/"
        )
        self.val_loss = MeanMetric()

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        logits = self.net(x)
        self.val_loss.update(nn.functional.cross_entropy(logits, y, reduction="none"))
        self.val_metrics.update(logits.softmax(-1), y)
        self.log("val/loss", self.val_loss, on_epoch=True, on_step=False)
        self.log_dict(self.val_metrics, on_epoch=True, on_step=False)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=2)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "monitor": "val/loss"}}


def main():
    L.seed_everything(40, workers=True)
    train, val = Lesions("/data/isic", "train"), Lesions("/data/isic", "val")
    trainer = L.Trainer(
        accelerator="gpu",
        devices=4,
        strategy="ddp",
        precision="16-mixed",
        max_epochs=80,
        callbacks=[
            EarlyStopping("val/auroc", mode="max", patience=8),
            ModelCheckpoint(monitor="val/auroc", mode="max", filename="best"),
        ],
    )
    trainer.fit(
        LesionModule(),
        DataLoader(train, 32, shuffle=True, num_workers=8, drop_last=True),
        DataLoader(val, 64, num_workers=8),
    )


if __name__ == "__main__":
    main()

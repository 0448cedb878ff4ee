import argparse

import lightning as L
import torch
import torch.nn as nn
import torchmetrics
import torchvision
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader
from torchvision import transforms as T


class Xray(L.LightningModule):
    def __init__(self, classes=14, lr=3e-4):
        super().__init__()
        self.save_hyperparameters()
        self.net = torchvision.models.densenet121(weights=None, num_classes=classes)
        self.criterion = nn.CrossEntropyLoss()
        self.val_loss = torchmetrics.MeanMetric()
        self.val_acc = torchmetrics.classification.MulticlassAccuracy(classes)
        self.val_auc = torchmetrics.classification.MulticlassAUROC(classes, thresholds=200)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.criterion(self(x), y)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.val_loss.update(self.criterion(logits, y), weight=len(y))
        self.val_acc.update(logits, y)
        self.val_auc.update(logits.softmax(-1), y)
        self.log("val/loss", self.val_loss, on_epoch=True, prog_bar=True)
        self.log("val/acc", self.val_acc, on_epoch=True)
        self.log("val/auc", self.val_auc, on_epoch=True)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        total = self.trainer.estimated_stepping_batches
        sched = torch.optim.lr_scheduler.OneCycleLR(opt, self.hparams.lr, total_steps=int(total))
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}


def loaders(root, batch):
    train_tf = T.Compose([T.RandomResizedCrop(224, (0.7, 1)), T.RandomHorizontalFlip(), T.ToTensor()])
    val_tf = T.Compose([T.Resize(256), T.CenterCrop(224), T.ToTensor()])
    train = torchvision.datasets.ImageFolder(f"{root}/train", train_tf)
    val = torchvision.datasets.ImageFolder(f"{root}/val", val_tf)
    return (DataLoader(train, batch, shuffle=True, num_workers=8, drop_last=True),
            DataLoader(val, batch, num_workers=8))


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", default="/data/cxr")
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--epochs", type=int, default=25)
    a = ap.parse_args()
    L.seed_everything(3, workers=True)
    tl, vl = loaders(a.root, a.batch)
    trainer = L.Trainer(
        accelerator="gpu", devices=4, strategy="ddp", sync_batchnorm=True, precision="bf16-mixed",
        max_epochs=a.epochs,
        callbacks=[ModelCheckpoint(monitor="val/auc", mode="max"), EarlyStopping("val/loss", patience=5)])
    trainer.fit(Xray(), tl, vl)

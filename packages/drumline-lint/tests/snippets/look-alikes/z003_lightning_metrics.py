import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from gestures import Gestures, TemporalNet


class GestureClassifier(L.LightningModule):
    def __init__(self, classes=27, lr=3e-4):
        super().__init__()
        self.save_hyperparameters()
        self.net = TemporalNet(classes)
        self.val_acc = MulticlassAccuracy(num_classes=classes)

    def training_step(self, batch, batch_idx):
        clip, label = batch
        loss = F.cross_entropy(self.net(clip), label)
        self.log("train_loss", loss, on_step=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        clip, label = batch
        self.val_acc(self.net(clip), label)
        self.log("val_acc", self.val_acc, on_epoch=True, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def main():
    L.seed_everything(42, workers=True)
    train_loader = DataLoader(Gestures("/data/jester", "train"), batch_size=16, shuffle=True,
                              num_workers=8, pin_memory=True)
    val_loader = DataLoader(Gestures("/data/jester", "val"), batch_size=32, num_workers=8)

    trainer = L.Trainer(
        accelerator="gpu",
        devices=8,
        strategy="ddp",
        sync_batchnorm=True,
        precision="bf16-mixed",
        max_epochs=35,
        callbacks=[ModelCheckpoint(dirpath="ckpt", monitor="val_acc", mode="max", save_last=True)],
    )
    trainer.fit(GestureClassifier(), train_loader, val_loader)


if __name__ == "__main__":
    main()

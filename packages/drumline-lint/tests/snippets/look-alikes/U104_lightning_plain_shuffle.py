import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader
from torchvision import models

from birds.data import CubDataset, train_tf, val_tf


class BirdModule(L.LightningModule):
    def __init__(self, lr=3e-4, epochs=60):
        super().__init__()
        self.save_hyperparameters()
        self.net = models.efficientnet_b3(num_classes=200)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y, label_smoothing=0.1)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits, y), sync_dist=True)
        self.log("val_acc", (logits.argmax(1) == y).float().mean(), sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, self.hparams.epochs)
        return [opt], [sched]


def main():
    L.seed_everything(11, workers=True)
    train = CubDataset("/data/cub", "train", train_tf)
    val = CubDataset("/data/cub", "val", val_tf)
    train_dl = DataLoader(train, batch_size=48, shuffle=True, num_workers=8, drop_last=True,
                          persistent_workers=True)
    val_dl = DataLoader(val, batch_size=96, num_workers=8, persistent_workers=True)

    trainer = L.Trainer(
        accelerator="gpu",
        devices=8,
        strategy="ddp",
        sync_batchnorm=True,
        precision="bf16-mixed",
        max_epochs=60,
        callbacks=[
            ModelCheckpoint(monitor="val_acc", mode="max", save_last=True),
            EarlyStopping(monitor="val_loss", patience=10),
        ],
    )
    trainer.fit(BirdModule(), train_dl, val_dl)
    trainer.print("best", trainer.checkpoint_callback.best_model_path)


if __name__ == "__main__":
    main()

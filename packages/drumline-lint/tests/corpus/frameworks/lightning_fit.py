"""Lightning starts the processes, wraps the model, puts the samplers in and saves on rank 0."""

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Digits(L.LightningDataModule):
    def __init__(self, batch_size=64, workers=4):
        super().__init__()
        self.batch_size = batch_size
        self.workers = workers

    def setup(self, stage):
        draw = torch.Generator().manual_seed(0)
        images = torch.rand(6000, 1, 28, 28, generator=draw)
        whole = TensorDataset(images, (images.mean(dim=(1, 2, 3)) * 1000).long() % 10)
        self.train_set, self.val_set = random_split(whole, [5000, 1000], generator=draw)

    def train_dataloader(self):
        return DataLoader(self.train_set, self.batch_size, shuffle=True, num_workers=self.workers, pin_memory=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, self.batch_size, num_workers=self.workers)


class Classifier(L.LightningModule):
    def __init__(self, width=128, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(784, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 10)
        )

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch, index):
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, index):
        images, labels = batch
        logits = self(images)
        self.log("val/loss", F.cross_entropy(logits, labels), sync_dist=True)
        self.log("val/acc", (logits.argmax(1) == labels).float().mean(), sync_dist=True)

    def on_train_epoch_end(self):
        if self.trainer.is_global_zero:
            print(f"epoch {self.current_epoch} is over")

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.hparams.lr, total_steps=self.trainer.estimated_stepping_batches
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--resume")
    args = parser.parse_args()
    L.seed_everything(3, workers=True)
    trainer = L.Trainer(
        accelerator="gpu",
        devices=args.devices,
        num_nodes=args.nodes,
        strategy="ddp",
        precision="16-mixed",
        max_epochs=args.epochs,
        accumulate_grad_batches=4,
        gradient_clip_val=1.0,
        sync_batchnorm=True,
        callbacks=[ModelCheckpoint(monitor="val/acc", mode="max"), LearningRateMonitor()],
    )
    data = Digits()
    trainer.fit(Classifier(), data, ckpt_path=args.resume)
    trainer.validate(datamodule=data)


if __name__ == "__main__":
    main()

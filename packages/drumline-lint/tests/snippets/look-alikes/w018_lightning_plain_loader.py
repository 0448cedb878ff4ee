import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader, random_split
from torchvision import transforms
from torchvision.datasets import CIFAR10


class Cifar(L.LightningDataModule):
    def prepare_data(self):
        CIFAR10("/shared/cifar", train=True, download=True)

    def setup(self, stage):
        full = CIFAR10("/shared/cifar", train=True, transform=transforms.ToTensor())
        self.train, self.val = random_split(full, [45000, 5000], generator=torch.Generator().manual_seed(3))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=128, shuffle=True, num_workers=4)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=250, num_workers=2)


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 128, 3), nn.ReLU(),
            nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(2048, 10),
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    trainer = L.Trainer(
        accelerator="gpu", devices=4, strategy="ddp", max_epochs=60,
        callbacks=[EarlyStopping("val_loss", patience=6), ModelCheckpoint(monitor="val_loss")],
    )
    trainer.fit(Net(), datamodule=Cifar())

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


class Data(L.LightningDataModule):
    def setup(self, stage):
        def tensors(name):
            blob = torch.load(f"/data/volumes/{name}.pt", map_location="cpu")
            return TensorDataset(blob["vol"], blob["site"])
        self.train_set, self.val_set = tensors("train"), tensors("val")

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=16, shuffle=True, num_workers=4)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=16, num_workers=4)


class SiteNet(L.LightningModule):
    def __init__(self, sites=7):
        super().__init__()
        self.net = nn.Sequential(nn.Conv3d(1, 16, 3, 2), nn.BatchNorm3d(16), nn.ReLU(),
                                 nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(16, sites))
        self.val_acc = MulticlassAccuracy(num_classes=sites)

    def training_step(self, batch, _):
        vol, site = batch
        return nn.functional.cross_entropy(self.net(vol), site)

    def validation_step(self, batch, _):
        vol, site = batch
        self.val_acc.update(self.net(vol), site)
        self.log("val_acc", self.val_acc, on_epoch=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    trainer = L.Trainer(accelerator="gpu", devices=4, strategy="ddp", max_epochs=50, sync_batchnorm=True,
                        callbacks=[ModelCheckpoint(monitor="val_acc", mode="max")])
    trainer.fit(SiteNet(), datamodule=Data())

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Volumes(L.LightningDataModule):
    def __init__(self, root="/data/volumes", batch_size=16):
        super().__init__()
        self.root, self.batch_size = root, batch_size

    def prepare_data(self):
        blob = torch.load(f"{self.root}/train.pt", map_location="cpu")
        self.train_set = TensorDataset(blob["vol"], blob["age"])
        blob = torch.load(f"{self.root}/val.pt", map_location="cpu")
        self.val_set = TensorDataset(blob["vol"], blob["age"])

    def train_dataloader(self):
        return DataLoader(self.train_set, self.batch_size, shuffle=True, num_workers=4)

    def val_dataloader(self):
        return DataLoader(self.val_set, self.batch_size, num_workers=4)


class AgeNet(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv3d(1, 16, 3, 2), nn.ReLU(), nn.Conv3d(16, 32, 3, 2), nn.ReLU(),
                                 nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(32, 1))

    def training_step(self, batch, _):
        vol, age = batch
        return nn.functional.l1_loss(self.net(vol).squeeze(1), age)

    def validation_step(self, batch, _):
        vol, age = batch
        self.log("val_mae", nn.functional.l1_loss(self.net(vol).squeeze(1), age), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    L.seed_everything(3)
    trainer = L.Trainer(accelerator="gpu", devices=4, strategy="ddp", max_epochs=50,
                        callbacks=[ModelCheckpoint(monitor="val_mae", mode="min")])
    trainer.fit(AgeNet(), datamodule=Volumes())

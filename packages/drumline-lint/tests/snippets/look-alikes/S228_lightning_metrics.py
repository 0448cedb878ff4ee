"""Lightning, 2 nodes x 4 GPUs (srun python lightning_metrics.py with 4 tasks per node)."""
import lightning as L
import timm
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy
from torchvision import transforms as T
from torchvision.datasets import EuroSAT


class SatData(L.LightningDataModule):
    def __init__(self, root="/lustre/eurosat", bs=128):
        super().__init__()
        self.root, self.bs = root, bs

    def prepare_data(self):
        EuroSAT(self.root, download=True)

    def setup(self, stage=None):
        ds = EuroSAT(self.root, transform=T.ToTensor())
        g = torch.Generator().manual_seed(1)
        self.train, self.val = torch.utils.data.random_split(ds, [0.8, 0.2], generator=g)

    def train_dataloader(self):
        return DataLoader(self.train, self.bs, shuffle=True, num_workers=8)

    def val_dataloader(self):
        return DataLoader(self.val, self.bs, num_workers=8)


class Sat(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = timm.create_model("resnet26d", num_classes=10)
        self.acc = MulticlassAccuracy(10)

    def training_step(self, batch, _):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        self.acc(self.net(x), y)
        self.log("val_acc", self.acc, on_step=False, on_epoch=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


if __name__ == "__main__":
    data = SatData()
    data.prepare_data_per_node = False
    trainer = L.Trainer(accelerator="gpu", devices=4, num_nodes=2, strategy="ddp", max_epochs=40,
                        callbacks=[ModelCheckpoint(monitor="val_acc", mode="max")])
    trainer.fit(Sat(), datamodule=data)
    trainer.save_checkpoint("final.ckpt")

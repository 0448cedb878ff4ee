import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torchmetrics.classification import MulticlassAccuracy
from torchvision.models import resnet18

from datamodule import EuroSatData


class LandUse(pl.LightningModule):
    def __init__(self, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = resnet18(weights=None, num_classes=10)
        self.acc = MulticlassAccuracy(10)

    def training_step(self, batch, _):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        self.acc(self.net(x), y)
        self.log("val_acc", self.acc, on_epoch=True, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    pl.seed_everything(42, workers=True)
    trainer = pl.Trainer(
        accelerator="gpu", devices=2, strategy="ddp", max_epochs=30, sync_batchnorm=True,
        callbacks=[ModelCheckpoint(monitor="val_acc", mode="max"), EarlyStopping("val_acc", mode="max", patience=5)],
    )
    trainer.fit(LandUse(), datamodule=EuroSatData())

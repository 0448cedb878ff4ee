import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger

from satellite.data import EuroSatModule
from satellite.model import build_convnext


class LandUse(pl.LightningModule):
    def __init__(self, n_classes=10, lr=1e-4):
        super().__init__()
        self.save_hyperparameters()
        self.net = build_convnext(n_classes)
        self.val_acc = torchmetrics.Accuracy(task="multiclass", num_classes=n_classes)
        self.val_f1 = torchmetrics.F1Score(task="multiclass", num_classes=n_classes, average="macro")

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.val_acc(logits, y)
        self.val_f1(logits, y)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/f1", self.val_f1, on_step=False, on_epoch=True)
        if batch_idx == 0 and self.trainer.is_global_zero:
            self.logger.experiment.add_images("val/batch", x[:16, :3].float(), self.global_step)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.05)
        sched = torch.optim.lr_scheduler.OneCycleLR(
            opt, self.hparams.lr, total_steps=self.trainer.estimated_stepping_batches)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}


def main():
    pl.seed_everything(3, workers=True)
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=-1,
        strategy="ddp",
        max_epochs=40,
        precision="16-mixed",
        gradient_clip_val=1.0,
        logger=TensorBoardLogger("tb", name="eurosat"),
        callbacks=[ModelCheckpoint(monitor="val/acc", mode="max", filename="best")],
    )
    trainer.fit(LandUse(), datamodule=EuroSatModule("/data/eurosat", batch_size=64))


if __name__ == "__main__":
    main()

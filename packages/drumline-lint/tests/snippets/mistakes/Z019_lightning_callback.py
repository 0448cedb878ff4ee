import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, LearningRateMonitor
from torch.utils.data import DataLoader

from lidar import PointPillars, SweepDataset, stack_sweeps


class EverySoOften(Callback):
    """Keeps a numbered checkpoint every few epochs."""

    def __init__(self, folder, every=5):
        self.folder = folder
        self.every = every

    def on_train_epoch_end(self, trainer, pl_module):
        if (trainer.current_epoch + 1) % self.every:
            return
        if trainer.is_global_zero:
            path = f"{self.folder}/epoch{trainer.current_epoch:03d}.ckpt"
            trainer.save_checkpoint(path)


class Detector(L.LightningModule):
    def __init__(self, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = PointPillars(classes=10)

    def training_step(self, batch, batch_idx):
        scores, boxes = self.net(batch["points"])
        loss = F.cross_entropy(scores, batch["labels"]) + F.smooth_l1_loss(boxes, batch["boxes"])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self.hparams.lr, total_steps=self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main():
    L.seed_everything(5, workers=True)
    loader = DataLoader(SweepDataset("/data/nuscenes"), batch_size=4, shuffle=True,
                        collate_fn=stack_sweeps, num_workers=8, pin_memory=True)
    trainer = L.Trainer(
        accelerator="gpu",
        devices=8,
        num_nodes=2,
        strategy="ddp",
        precision="bf16-mixed",
        sync_batchnorm=True,
        max_epochs=40,
        enable_checkpointing=False,
        callbacks=[EverySoOften("/lustre/lidar/ckpt"), LearningRateMonitor()],
    )
    trainer.fit(Detector(), loader)


if __name__ == "__main__":
    main()

from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class PeriodicExport(Callback):
    """Keeps a numbered checkpoint every few thousand updates."""

    def __init__(self, folder, every):
        self.folder, self.every = Path(folder), every

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        step = trainer.global_step
        if step == 0 or step % self.every:
            return
        if trainer.is_global_zero:
            trainer.save_checkpoint(self.folder / f"step{step}.ckpt")


class Denoiser(L.LightningModule):
    def __init__(self, channels=1, width=64, lr=2e-4):
        super().__init__()
        self.save_hyperparameters()
        layers = [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
        for _ in range(8):
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(8, width), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.Conv2d(width, channels, 3, padding=1))

    def training_step(self, batch, _):
        (clean,) = batch
        sigma = torch.rand(len(clean), 1, 1, 1, device=self.device) * 0.2
        noise = torch.randn_like(clean) * sigma
        loss = F.mse_loss(self.net(clean + noise), noise)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class Patches(L.LightningDataModule):
    def setup(self, stage):
        self.data = TensorDataset(torch.load("data/patches.pt", map_location="cpu", weights_only=True))

    def train_dataloader(self):
        return DataLoader(self.data, 128, shuffle=True, num_workers=4, pin_memory=True, drop_last=True)


def main():
    L.seed_everything(3, workers=True)
    trainer = L.Trainer(
        accelerator="gpu",
        devices=4,
        strategy="ddp",
        precision="bf16-mixed",
        max_epochs=50,
        callbacks=[PeriodicExport("ckpt", 5000)],
        enable_checkpointing=False,
    )
    trainer.fit(Denoiser(), datamodule=Patches())


if __name__ == "__main__":
    main()

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class KeepEvery(pl.Callback):
    def __init__(self, every, folder):
        self.every, self.folder = every, folder

    def on_train_epoch_end(self, trainer, pl_module):
        epoch = trainer.current_epoch
        if trainer.is_global_zero and epoch % self.every == 0:
            trainer.save_checkpoint(f"{self.folder}/era_{epoch:03d}.ckpt")


class Downscale(pl.LightningModule):
    def __init__(self, factor=4):
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(
            nn.Conv2d(5, 64, 3, padding=1), nn.GELU(),
            nn.Conv2d(64, 64, 3, padding=1), nn.GELU(),
            nn.Conv2d(64, factor * factor, 3, padding=1), nn.PixelShuffle(factor))

    def training_step(self, batch, batch_idx):
        coarse, fine = batch
        loss = nn.functional.l1_loss(self.body(coarse), fine)
        self.log("train_l1", loss)
        return loss

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=4e-4)
        return {"optimizer": opt,
                "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(opt, 60)}


def main():
    pl.seed_everything(8, workers=True)
    d = torch.load("/data/era5_pairs.pt", map_location="cpu", mmap=True)
    loader = DataLoader(TensorDataset(d["coarse"], d["fine"]), batch_size=32, shuffle=True,
                        num_workers=8, drop_last=True)
    trainer = pl.Trainer(accelerator="gpu", devices=4, num_nodes=2, strategy="ddp", max_epochs=60,
                         enable_checkpointing=False, callbacks=[KeepEvery(5, "/shared/era")])
    trainer.fit(Downscale(), loader)


if __name__ == "__main__":
    main()

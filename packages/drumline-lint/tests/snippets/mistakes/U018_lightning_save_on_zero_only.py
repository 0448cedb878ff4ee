import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger

from vae.data import CelebADataModule
from vae.nets import Decoder, Encoder


class Snapshot(Callback):
    def __init__(self, every=2000, where="snapshots"):
        self.every = every
        self.where = where

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        step = trainer.global_step
        if step == 0 or step % self.every:
            return
        if trainer.is_global_zero:
            trainer.save_checkpoint(f"{self.where}/step-{step}.ckpt")
            print(f"snapshot at {step}")


class VAE(L.LightningModule):
    def __init__(self, z=256, beta=1.0, lr=2e-4):
        super().__init__()
        self.save_hyperparameters()
        self.enc, self.dec = Encoder(z), Decoder(z)

    def training_step(self, batch, _):
        x, _labels = batch
        mu, logvar = self.enc(x)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        rec = F.mse_loss(self.dec(z), x, reduction="sum") / x.size(0)
        kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
        self.log_dict({"rec": rec, "kl": kl}, prog_bar=True)
        return rec + self.hparams.beta * kl

    def on_train_start(self):
        torch.manual_seed(7 + self.global_rank)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def main():
    trainer = L.Trainer(
        accelerator="gpu",
        devices=4,
        strategy="ddp",
        precision="bf16-mixed",
        max_epochs=80,
        logger=CSVLogger("logs"),
        enable_checkpointing=False,
        callbacks=[Snapshot(), LearningRateMonitor("epoch")],
    )
    trainer.fit(VAE(), datamodule=CelebADataModule("/data/celeba", batch_size=64))


if __name__ == "__main__":
    main()

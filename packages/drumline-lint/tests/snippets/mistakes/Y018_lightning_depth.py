import argparse

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader

from depth import DPTDecoder, NYUDepth, build_encoder


class DepthModule(L.LightningModule):
    def __init__(self, lr=1e-4, encoder="vit_l"):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = build_encoder(encoder)
        self.decoder = DPTDecoder(self.encoder.width)

    def forward(self, image):
        return self.decoder(self.encoder(image))

    def training_step(self, batch, batch_idx):
        image, depth = batch
        loss = F.l1_loss(self(image), depth)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        image, depth = batch
        err = F.l1_loss(self(image), depth)
        self.log("val/l1", err, sync_dist=True)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=self.trainer.max_epochs)
        return [opt], [sched]


def main(args):
    L.seed_everything(42, workers=True)
    train = DataLoader(NYUDepth(args.data, "train"), batch_size=8, shuffle=True,
                       num_workers=8, pin_memory=True, drop_last=True)
    val = DataLoader(NYUDepth(args.data, "val"), batch_size=8, num_workers=4)

    trainer = L.Trainer(
        accelerator="gpu",
        devices=8,
        strategy="ddp",
        precision="bf16-mixed",
        max_epochs=args.epochs,
        logger=TensorBoardLogger(args.out),
        callbacks=[LearningRateMonitor("epoch")],
        enable_checkpointing=False,
    )
    model = DepthModule()
    trainer.fit(model, train, val)

    # keep only the final weights
    if trainer.is_global_zero:
        trainer.save_checkpoint(f"{args.out}/final.ckpt", weights_only=True)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="/data/nyu")
    ap.add_argument("--out", default="runs/depth")
    ap.add_argument("--epochs", type=int, default=30)
    main(ap.parse_args())

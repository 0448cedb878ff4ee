import argparse

import lightning as L
import segmentation_models_pytorch as smp
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from torch.utils.data import DataLoader

from roads.data import RoadTiles


class RoadSegmenter(L.LightningModule):
    def __init__(self, lr=3e-4, encoder="resnet50"):
        super().__init__()
        self.save_hyperparameters()
        self.net = smp.Unet(encoder, encoder_weights="imagenet", classes=1)
        self.dice = smp.losses.DiceLoss("binary")
        self.bce = torch.nn.BCEWithLogitsLoss()

    def forward(self, x):
        return self.net(x)

    def loss(self, batch):
        x, y = batch
        out = self(x)
        return self.dice(out, y) + self.bce(out, y), out, y

    def training_step(self, batch, _):
        loss, _, _ = self.loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, _):
        loss, out, y = self.loss(batch)
        pred = out.sigmoid() > 0.5
        inter = (pred & y.bool()).sum((1, 2, 3)).float()
        union = (pred | y.bool()).sum((1, 2, 3)).float()
        iou = ((inter + 1) / (union + 1)).mean()
        self.log("val/loss", loss, on_epoch=True, prog_bar=True)
        self.log("val/iou", iou, on_epoch=True, prog_bar=True)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, self.trainer.max_epochs)
        return [opt], [sched]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--tiles", required=True)
    ap.add_argument("--gpus", type=int, default=8)
    ap.add_argument("--epochs", type=int, default=40)
    args = ap.parse_args()

    L.seed_everything(7, workers=True)
    train = DataLoader(RoadTiles(args.tiles, "train"), 8, shuffle=True, num_workers=6, drop_last=True)
    val = DataLoader(RoadTiles(args.tiles, "val"), 8, num_workers=6)

    ckpt = ModelCheckpoint(monitor="val/iou", mode="max", save_top_k=1, filename="best")
    trainer = L.Trainer(accelerator="gpu", devices=args.gpus, strategy="ddp",
                        precision="16-mixed", max_epochs=args.epochs,
                        callbacks=[ckpt, LearningRateMonitor()])
    trainer.fit(RoadSegmenter(), train, val)
    trainer.print("best", ckpt.best_model_path, ckpt.best_model_score)


if __name__ == "__main__":
    main()

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from ecg import PTBXL, ResNet1d


class ECGClassifier(L.LightningModule):
    def __init__(self, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = ResNet1d(leads=12, classes=5)

    def forward(self, signal):
        return self.net(signal)

    def training_step(self, batch, batch_idx):
        signal, target = batch
        loss = F.binary_cross_entropy_with_logits(self(signal), target)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        signal, target = batch
        loss = F.binary_cross_entropy_with_logits(self(signal), target)
        self.log("val/loss", loss, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="/data/ptbxl")
    ap.add_argument("--nodes", type=int, default=1)
    args = ap.parse_args()

    L.seed_everything(7, workers=True)
    train_loader = DataLoader(PTBXL(args.data, folds=range(1, 9)), batch_size=128,
                              shuffle=True, num_workers=6, pin_memory=True, drop_last=True)
    val_loader = DataLoader(PTBXL(args.data, folds=[9]), batch_size=256, num_workers=4)

    trainer = L.Trainer(
        accelerator="gpu",
        devices=4,
        num_nodes=args.nodes,
        strategy="ddp",
        max_epochs=50,
        callbacks=[ModelCheckpoint(monitor="val/loss", save_top_k=1)],
    )
    trainer.fit(ECGClassifier(), train_loader, val_loader)


if __name__ == "__main__":
    main()

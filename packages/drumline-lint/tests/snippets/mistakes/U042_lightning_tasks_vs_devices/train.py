from argparse import ArgumentParser

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from cryo.data import MapsDataModule
from cryo.lit import LitUNet3d


def main():
    ap = ArgumentParser()
    ap.add_argument("--data", required=True)
    ap.add_argument("--epochs", type=int, default=100)
    ap.add_argument("--batch", type=int, default=4)
    args = ap.parse_args()

    L.seed_everything(2024, workers=True)
    trainer = L.Trainer(
        accelerator="gpu",
        devices=4,
        num_nodes=2,
        strategy="ddp",
        precision="16-mixed",
        max_epochs=args.epochs,
        sync_batchnorm=True,
        callbacks=[ModelCheckpoint(monitor="val_dice", mode="max", save_last=True)],
    )
    trainer.fit(LitUNet3d(), datamodule=MapsDataModule(args.data, args.batch))


if __name__ == "__main__":
    main()

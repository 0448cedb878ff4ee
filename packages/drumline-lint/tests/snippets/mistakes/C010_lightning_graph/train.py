import argparse

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from molgraph.data import MoleculeModule
from molgraph.model import GraphRegressor


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--max-epochs", type=int, default=100)
    args = parser.parse_args()

    pl.seed_everything(17, workers=True)
    data = MoleculeModule("/data/qm9", batch_size=args.batch_size, num_workers=6)
    model = GraphRegressor(hidden=256, layers=6)

    trainer = pl.Trainer(
        accelerator="gpu",
        devices=4,
        num_nodes=2,
        strategy="ddp",
        max_epochs=args.max_epochs,
        precision="bf16-mixed",
        callbacks=[ModelCheckpoint(monitor="val_mae", mode="min", save_last=True)],
    )
    trainer.fit(model, datamodule=data)


if __name__ == "__main__":
    main()

import argparse

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Micrographs(Dataset):
    def __init__(self, listing):
        with open(listing) as fh:
            self.rows = [line.split() for line in fh]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        image, label = self.rows[i]
        return torch.load(image, map_location="cpu").float(), torch.load(label, map_location="cpu").float()


class GrainEdges(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 32, 7, padding=3), nn.ReLU(),
                                 nn.Conv2d(32, 32, 5, padding=2), nn.ReLU(), nn.Conv2d(32, 1, 1))

    def training_step(self, batch, _):
        x, edge = batch
        loss = nn.functional.binary_cross_entropy_with_logits(self.net(x), edge)
        self.log("loss", loss)
        return loss

    def on_train_epoch_end(self):
        rank_zero_info(f"epoch {self.current_epoch} finished")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--list", default="/data/grains/train.txt")
    ap.add_argument("--gpus", type=int, default=4)
    ap.add_argument("--epochs", type=int, default=100)
    args = ap.parse_args()
    loader = DataLoader(Micrographs(args.list), batch_size=8, shuffle=True, num_workers=6, drop_last=True)
    trainer = L.Trainer(accelerator="gpu", devices=args.gpus, strategy="ddp", max_epochs=args.epochs,
                        default_root_dir="runs/grains")
    trainer.fit(GrainEdges(), loader)
    trainer.save_checkpoint("runs/grains/final.ckpt")


if __name__ == "__main__":
    main()

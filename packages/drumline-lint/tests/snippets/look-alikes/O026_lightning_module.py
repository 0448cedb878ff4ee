import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader

from cars.data import StanfordCars
from cars.model import build


class CarsModel(L.LightningModule):
    def __init__(self, lr=3e-4):
        super().__init__()
        self.save_hyperparameters()
        self.net = build(196)

    def training_step(self, batch, _):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        acc = (self.net(x).argmax(1) == y).float().mean()
        self.log("val/acc", acc, sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def main():
    L.seed_everything(3, workers=True)
    train = DataLoader(StanfordCars("train"), batch_size=32, shuffle=True, num_workers=8)
    val = DataLoader(StanfordCars("test"), batch_size=64, num_workers=8)
    ckpt = ModelCheckpoint(monitor="val/acc", mode="max", save_last=True)
    stop = EarlyStopping("val/acc", mode="max", patience=5)
    trainer = L.Trainer(accelerator="gpu", devices=4, strategy="ddp", max_epochs=60,
                        precision="bf16-mixed", callbacks=[ckpt, stop])
    trainer.fit(CarsModel(), train, val)
    trainer.save_checkpoint("final.ckpt")


if __name__ == "__main__":
    main()

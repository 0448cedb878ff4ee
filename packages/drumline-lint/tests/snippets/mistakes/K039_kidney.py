import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def volumes(split):
    d = torch.load(f"/data/kits/{split}.pt", map_location="cpu")
    return TensorDataset(d["ct"].float(), d["mask"].float())


class KidneySeg(L.LightningModule):
    def __init__(self, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv3d(1, 16, 3, padding=1), nn.InstanceNorm3d(16), nn.LeakyReLU(),
            nn.Conv3d(16, 32, 3, padding=1), nn.InstanceNorm3d(32), nn.LeakyReLU(),
            nn.Conv3d(32, 1, 1))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, _):
        ct, mask = batch
        loss = nn.functional.binary_cross_entropy_with_logits(self(ct), mask)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, _):
        ct, mask = batch
        pred = (self(ct) > 0).float()
        dice = 2 * (pred * mask).sum() / (pred.sum() + mask.sum() + 1e-6)
        self.log("val_dice", dice, prog_bar=True, on_epoch=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def main():
    L.seed_everything(3)
    train = DataLoader(volumes("train"), batch_size=2, shuffle=True, num_workers=6, drop_last=True)
    val = DataLoader(volumes("val"), batch_size=2, num_workers=4)
    best = ModelCheckpoint(monitor="val_dice", mode="max", save_top_k=2)
    trainer = L.Trainer(accelerator="gpu", devices=8, strategy="ddp", max_epochs=200,
                        callbacks=[best], precision="16-mixed")
    trainer.fit(KidneySeg(), train, val)


if __name__ == "__main__":
    main()

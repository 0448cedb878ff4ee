import argparse

import lightning as L
import torch
import torchaudio
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset


class ESC50(Dataset):
    def __init__(self, root, folds):
        with open(f"{root}/meta/esc50.csv") as f:
            rows = [line.strip().split(",") for line in f][1:]
        self.rows = [(f"{root}/audio/{r[0]}", int(r[2])) for r in rows if int(r[1]) in folds]
        self.mel = torchaudio.transforms.MelSpectrogram(44100, n_fft=2048, n_mels=128)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        path, y = self.rows[i]
        wav, _ = torchaudio.load(path)
        return self.mel(wav).clamp(min=1e-5).log(), y


class AudioNet(L.LightningModule):
    def __init__(self, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()

        def block(i, o):
            return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(), nn.MaxPool2d(2))
        self.net = nn.Sequential(block(1, 32), block(32, 64), block(64, 128), block(128, 256),
                                 nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 50))
        self.val_acc = torchmetrics.Accuracy(task="multiclass", num_classes=50)

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        self.val_acc(self.net(x), y)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), self.hparams.lr)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("root")
    p.add_argument("--fold", type=int, default=5)
    args = p.parse_args()

    train = ESC50(args.root, {1, 2, 3, 4, 5} - {args.fold})
    val = ESC50(args.root, {args.fold})
    trainer = L.Trainer(accelerator="gpu", devices=2, strategy="ddp", max_epochs=100,
                        sync_batchnorm=True,
                        callbacks=[ModelCheckpoint(monitor="val/acc", mode="max")])
    trainer.fit(AudioNet(),
                DataLoader(train, 32, shuffle=True, num_workers=4, drop_last=True),
                DataLoader(val, 32, num_workers=4))


if __name__ == "__main__":
    main()

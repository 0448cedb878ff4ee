"""Speaker identification on VoxCeleb1 with Lightning, four GPUs."""
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.nn as nn
import torch.nn.functional as F
import torchaudio
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader, Dataset


class VoxDataset(Dataset):
    def __init__(self, root, listing, seconds=3):
        with open(Path(root) / listing) as f:
            rows = [line.split() for line in f]
        self.items = [(Path(root) / path, int(speaker)) for path, speaker in rows]
        self.length = seconds * 16000

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        path, speaker = self.items[i]
        wav, _ = torchaudio.load(path, num_frames=self.length)
        return F.pad(wav[0], (0, self.length - wav.size(1))), speaker


class VoxData(pl.LightningDataModule):
    def __init__(self, root="/data/voxceleb1", batch_size=64):
        super().__init__()
        self.root, self.batch_size = root, batch_size

    def setup(self, stage=None):
        self.train = VoxDataset(self.root, "train.txt")
        self.val = VoxDataset(self.root, "val.txt")

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True, num_workers=8, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val, self.batch_size, num_workers=4)


class SpeakerNet(pl.LightningModule):
    def __init__(self, speakers=1251, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.mel = torchaudio.transforms.MelSpectrogram(16000, n_mels=64)
        self.rnn = nn.GRU(64, 384, 3, batch_first=True, bidirectional=True)
        self.head = nn.Linear(768, speakers)

    def forward(self, wav):
        feats = self.mel(wav).clamp_min(1e-6).log().transpose(1, 2)
        return self.head(self.rnn(feats)[0].mean(1))

    def training_step(self, batch, _):
        wav, speaker = batch
        loss = F.cross_entropy(self(wav), speaker)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, _):
        wav, speaker = batch
        acc = (self(wav).argmax(1) == speaker).float().mean()
        self.log("val_acc", acc, prog_bar=True)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return [opt], [torch.optim.lr_scheduler.CosineAnnealingLR(opt, 60)]


if __name__ == "__main__":
    pl.seed_everything(3, workers=True)
    trainer = pl.Trainer(
        accelerator="gpu", devices=4, strategy="ddp", max_epochs=60, precision="16-mixed",
        callbacks=[
            ModelCheckpoint("ckpt/speaker", monitor="val_acc", mode="max", save_last=True),
            EarlyStopping(monitor="val_acc", mode="max", patience=5),
        ],
    )
    trainer.fit(SpeakerNet(), datamodule=VoxData())

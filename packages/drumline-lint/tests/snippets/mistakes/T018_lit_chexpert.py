from argparse import ArgumentParser

import pandas as pd
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
import torchvision
from PIL import Image
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms as T

FINDINGS = ["Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Pleural Effusion"]


class CheXpert(Dataset):
    def __init__(self, root, csv, train):
        self.root = root
        self.df = pd.read_csv(f"{root}/{csv}").fillna(0).replace(-1, 0)
        aug = [T.RandomAffine(10, (0.05, 0.05))] if train else []
        self.tf = T.Compose([T.Resize((320, 320)), *aug, T.ToTensor(), T.Normalize([0.5], [0.25])])

    def __len__(self):
        return len(self.df)

    def __getitem__(self, i):
        row = self.df.iloc[i]
        img = Image.open(f"{self.root}/{row.Path}").convert("L")
        return self.tf(img), torch.tensor(row[FINDINGS].to_numpy(dtype="float32"))


class CheXpertData(pl.LightningDataModule):
    def __init__(self, root, batch_size):
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        return DataLoader(CheXpert(self.hparams.root, "train.csv", True), self.hparams.batch_size,
                          shuffle=True, num_workers=8, pin_memory=True)

    def val_dataloader(self):
        return DataLoader(CheXpert(self.hparams.root, "valid.csv", False), self.hparams.batch_size, num_workers=8)


class Classifier(pl.LightningModule):
    def __init__(self, lr=1e-4):
        super().__init__()
        self.save_hyperparameters()
        self.net = torchvision.models.densenet121(weights=None, num_classes=len(FINDINGS))
        self.net.features.conv0 = torch.nn.Conv2d(1, 64, 7, 2, 3, bias=False)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, _):
        x, y = batch
        loss = F.binary_cross_entropy_with_logits(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        loss = F.binary_cross_entropy_with_logits(self(x), y)
        self.log("val_loss", loss, on_epoch=True, prog_bar=True)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return [opt], [torch.optim.lr_scheduler.CosineAnnealingLR(opt, self.trainer.max_epochs)]


if __name__ == "__main__":
    ap = ArgumentParser()
    ap.add_argument("--root", default="/data/chexpert")
    ap.add_argument("--batch_size", type=int, default=32)
    ap.add_argument("--devices", type=int, default=4)
    args = ap.parse_args()

    pl.seed_everything(42, workers=True)
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=args.devices,
        strategy="ddp",
        max_epochs=20,
        precision="16-mixed",
        logger=CSVLogger("logs"),
        callbacks=[
            ModelCheckpoint(monitor="val_loss", mode="min", save_top_k=1, filename="{epoch}-{val_loss:.4f}"),
            EarlyStopping("val_loss", patience=4),
        ],
    )
    trainer.fit(Classifier(), datamodule=CheXpertData(args.root, args.batch_size))

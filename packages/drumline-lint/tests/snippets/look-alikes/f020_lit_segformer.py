import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from PIL import Image
from pathlib import Path
from torch.utils.data import DataLoader, Dataset
from transformers import SegformerForSemanticSegmentation

CLASSES = 150


class ADE(Dataset):
    def __init__(self, root, split, size=512):
        self.images = sorted((Path(root) / "images" / split).glob("*.jpg"))
        self.root, self.split, self.size = Path(root), split, size

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        path = self.images[i]
        mask = self.root / "annotations" / self.split / (path.stem + ".png")
        image = Image.open(path).convert("RGB").resize((self.size, self.size))
        label = Image.open(mask).resize((self.size, self.size), Image.NEAREST)
        x = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1
        y = torch.from_numpy(np.array(label)).long() - 1
        return x, y.masked_fill(y < 0, 255)


class Segmenter(pl.LightningModule):
    def __init__(self, lr=6e-5):
        super().__init__()
        self.save_hyperparameters()
        self.net = SegformerForSemanticSegmentation.from_pretrained("nvidia/mit-b2", num_labels=CLASSES).train()

    def forward(self, x):
        logits = self.net(pixel_values=x).logits
        return F.interpolate(logits, size=x.shape[-2:], mode="bilinear", align_corners=False)

    def training_step(self, batch, _):
        x, y = batch
        loss = F.cross_entropy(self(x), y, ignore_index=255)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        pred = self(x).argmax(1)
        valid = y != 255
        self.log("val/pixel_acc", (pred[valid] == y[valid]).float().mean(), sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.01)
        sched = torch.optim.lr_scheduler.PolynomialLR(opt, self.trainer.estimated_stepping_batches)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}


def main():
    pl.seed_everything(0, workers=True)
    root = "/data/ade20k"
    train = DataLoader(ADE(root, "training"), batch_size=4, shuffle=True, num_workers=6, drop_last=True)
    val = DataLoader(ADE(root, "validation"), batch_size=4, num_workers=4)
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=8,
        strategy="ddp",
        sync_batchnorm=True,
        precision="16-mixed",
        max_epochs=128,
        callbacks=[ModelCheckpoint(monitor="val/pixel_acc", mode="max"), LearningRateMonitor()],
    )
    trainer.fit(Segmenter(), train, val)


if __name__ == "__main__":
    main()

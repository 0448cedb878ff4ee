import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassF1Score


class Intent(pl.LightningModule):
    def __init__(self, intents=64, dim=384):
        super().__init__()
        self.head = nn.Sequential(nn.Linear(dim, 512), nn.GELU(), nn.Dropout(0.2), nn.Linear(512, intents))
        self.val_f1 = MulticlassF1Score(intents, average="macro")

    def training_step(self, batch, _):
        emb, y = batch
        return nn.functional.cross_entropy(self.head(emb), y)

    def validation_step(self, batch, _):
        emb, y = batch
        self.val_f1.update(self.head(emb), y)
        self.log("val_f1", self.val_f1, on_step=False, on_epoch=True, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Embeddings(pl.LightningDataModule):
    def __init__(self, root, batch_size=512):
        super().__init__()
        self.root, self.batch_size = root, batch_size

    def setup(self, stage):
        def read(split):
            d = torch.load(f"{self.root}/{split}.pt", map_location="cpu")
            return TensorDataset(d["emb"], d["intent"])
        self.train, self.val = read("train"), read("val")

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True, num_workers=2)

    def val_dataloader(self):
        return DataLoader(self.val, self.batch_size, num_workers=2)


if __name__ == "__main__":
    pl.seed_everything(1, workers=True)
    keep = ModelCheckpoint(monitor="val_f1", mode="max")
    trainer = pl.Trainer(accelerator="gpu", devices=2, strategy="ddp", max_epochs=40, callbacks=[keep])
    trainer.fit(Intent(), datamodule=Embeddings("/data/banking77"))

import lightning as L
import torch
from torch import nn

from datamodule import ReviewData


class StarModel(L.LightningModule):
    def __init__(self, vocab_size=30_002, dim=128):
        super().__init__()
        self.save_hyperparameters()
        self.emb = nn.EmbeddingBag(vocab_size, dim, padding_idx=0)
        self.fc = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, 5))

    def forward(self, x):
        return self.fc(self.emb(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_acc", (self(x).argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)


if __name__ == "__main__":
    trainer = L.Trainer(accelerator="gpu", devices=8, strategy="ddp", max_epochs=5)
    trainer.fit(StarModel(), datamodule=ReviewData())

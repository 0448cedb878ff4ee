import lightning as L
import torch
import torchvision
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms as T


def images(split):
    tf = T.Compose([T.Resize((256, 256)), T.ToTensor()])
    return torchvision.datasets.ImageFolder(f"/data/isic/{split}", tf)


class Lesions(L.LightningModule):
    def __init__(self, classes, lr=3e-4):
        super().__init__()
        self.save_hyperparameters()
        self.net = torchvision.models.efficientnet_b0(num_classes=classes)
        self.ce = nn.CrossEntropyLoss()

    def training_step(self, batch, idx):
        x, y = batch
        loss = self.ce(self.net(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, idx):
        x, y = batch
        self.log("val_loss", self.ce(self.net(x), y), on_step=False, on_epoch=True,
                 sync_dist=True, batch_size=len(y))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def main():
    L.seed_everything(5, workers=True)
    train = images("train")
    train_dl = DataLoader(train, 48, shuffle=True, num_workers=8, drop_last=True)
    val_dl = DataLoader(images("val"), 96, num_workers=4)
    trainer = L.Trainer(
        accelerator="gpu", devices=4, strategy="ddp", sync_batchnorm=True, max_epochs=80,
        callbacks=[ModelCheckpoint(monitor="val_loss"), EarlyStopping("val_loss", patience=6)])
    trainer.fit(Lesions(len(train.classes)), train_dl, val_dl)


if __name__ == "__main__":
    main()

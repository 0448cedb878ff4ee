import lightning as L
import torch
import torch.nn.functional as F
import torchmetrics
import torchvision
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader
from torchvision import transforms as T


class Food(L.LightningDataModule):
    def __init__(self, root="/data", batch_size=64):
        super().__init__()
        self.root, self.batch_size = root, batch_size
        self.tf = T.Compose([T.Resize(256), T.CenterCrop(224), T.ToTensor(), T.Normalize([0.5] * 3, [0.25] * 3)])

    def prepare_data(self):
        torchvision.datasets.Food101(self.root, download=True)

    def setup(self, stage=None):
        self.train = torchvision.datasets.Food101(self.root, "train", transform=self.tf)
        self.val = torchvision.datasets.Food101(self.root, "test", transform=self.tf)

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True, num_workers=8)

    def val_dataloader(self):
        return DataLoader(self.val, self.batch_size, num_workers=8)


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torchvision.models.regnet_y_800mf(num_classes=101)
        self.val_acc = torchmetrics.Accuracy(task="multiclass", num_classes=101)
        self.val_f1 = torchmetrics.F1Score(task="multiclass", num_classes=101, average="macro")

    def training_step(self, batch, _):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        logits = self.net(x)
        self.val_acc(logits, y)
        self.val_f1(logits, y)
        self.log("val_acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val_f1", self.val_f1, on_step=False, on_epoch=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


if __name__ == "__main__":
    trainer = L.Trainer(accelerator="gpu", devices=4, strategy="ddp", max_epochs=40, sync_batchnorm=True,
                        callbacks=[ModelCheckpoint(monitor="val_acc", mode="max"),
                                   EarlyStopping("val_acc", mode="max", patience=6)])
    trainer.fit(Net(), Food())

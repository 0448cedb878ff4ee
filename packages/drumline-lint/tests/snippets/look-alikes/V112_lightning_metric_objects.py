import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy
from torchvision import transforms
from torchvision.datasets import CIFAR100
from torchvision.models import resnet18

ROOT = "/data/cifar"


class Classifier(L.LightningModule):
    def __init__(self, lr=0.1, epochs=200):
        super().__init__()
        self.save_hyperparameters()
        self.net = resnet18(num_classes=100)
        self.val_acc = MulticlassAccuracy(num_classes=100, average="micro")

    def training_step(self, batch, _):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        logits = self.net(x)
        self.val_acc.update(logits, y)
        self.log("val_acc", self.val_acc, on_epoch=True, prog_bar=True)
        self.log("val_loss", F.cross_entropy(logits, y), on_epoch=True, sync_dist=True)

    def configure_optimizers(self):
        opt = torch.optim.SGD(self.parameters(), self.hparams.lr, momentum=0.9, nesterov=True)
        sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, self.hparams.epochs)
        return {"optimizer": opt, "lr_scheduler": sched}


def main():
    L.seed_everything(3, workers=True)
    aug = transforms.Compose([transforms.RandomCrop(32, 4), transforms.RandomHorizontalFlip(),
                              transforms.ToTensor()])
    train = DataLoader(CIFAR100(ROOT, True, aug), 128, shuffle=True, num_workers=4)
    val = DataLoader(CIFAR100(ROOT, False, transforms.ToTensor()), 250, num_workers=4)
    trainer = L.Trainer(
        accelerator="gpu",
        devices=8,
        strategy="ddp",
        max_epochs=200,
        callbacks=[
            ModelCheckpoint(monitor="val_acc", mode="max", save_top_k=1),
            EarlyStopping(monitor="val_loss", patience=20),
        ],
    )
    trainer.fit(Classifier(), train, val)


if __name__ == "__main__":
    main()

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from torchvision import tv_tensors
from torchvision.datasets import VOCDetection, wrap_dataset_for_transforms_v2
from torchvision.transforms import v2

from module import FcosModule


def collate(batch):
    return tuple(zip(*batch))


class VocData(pl.LightningDataModule):
    def __init__(self, root):
        super().__init__()
        self.root = root

    def prepare_data(self):
        VOCDetection(self.root, year="2012", image_set="train", download=True)

    def setup(self, stage):
        tf = v2.Compose([v2.ToImage(), v2.RandomHorizontalFlip(), v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True)])
        ev = v2.Compose([v2.ToImage(), v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True)])
        keys = {"boxes", "labels"}
        self.train = wrap_dataset_for_transforms_v2(VOCDetection(self.root, image_set="train", transforms=tf), keys)
        self.val = wrap_dataset_for_transforms_v2(VOCDetection(self.root, image_set="val", transforms=ev), keys)

    def train_dataloader(self):
        return DataLoader(self.train, 8, shuffle=True, collate_fn=collate, num_workers=4, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val, 8, collate_fn=collate, num_workers=4)


if __name__ == "__main__":
    pl.seed_everything(1, workers=True)
    trainer = pl.Trainer(accelerator="gpu", devices=8, strategy="ddp", max_epochs=12)
    trainer.fit(FcosModule(), datamodule=VocData("data/voc"))

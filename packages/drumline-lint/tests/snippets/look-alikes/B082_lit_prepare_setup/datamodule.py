from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, random_split
from torchvision import transforms
from torchvision.datasets import EuroSAT


class EuroSatData(pl.LightningDataModule):
    def __init__(self, root="data", batch_size=64, seed=42):
        super().__init__()
        self.root, self.batch_size, self.seed = Path(root), batch_size, seed

    def prepare_data(self):
        EuroSAT(self.root, download=True)

    def setup(self, stage):
        full = EuroSAT(self.root, transform=transforms.ToTensor())
        n_val = len(full) // 10
        generator = torch.Generator().manual_seed(self.seed)
        self.train, self.val = random_split(full, [len(full) - n_val, n_val], generator=generator)

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True, num_workers=4, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val, self.batch_size, num_workers=4)

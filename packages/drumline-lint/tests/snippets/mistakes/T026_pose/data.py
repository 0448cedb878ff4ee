import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class KeypointDataset(Dataset):
    def __init__(self, path):
        blob = np.load(path, mmap_mode="r", allow_pickle=False)
        self.img, self.hm, self.w = blob["img"], blob["heatmap"], blob["weight"]

    def __len__(self):
        return len(self.img)

    def __getitem__(self, i):
        return (torch.from_numpy(self.img[i].astype("float32") / 255).permute(2, 0, 1),
                torch.from_numpy(self.hm[i].astype("float32")), torch.from_numpy(self.w[i].astype("float32")))


def build_loader(cfg, split):
    ds = KeypointDataset(cfg[f"{split}_file"])
    train = split == "train"
    sampler = DistributedSampler(ds, shuffle=train, drop_last=train)
    return DataLoader(ds, cfg["batch_size"], sampler=sampler, num_workers=cfg["workers"], drop_last=train)

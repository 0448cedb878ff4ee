import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class CaptionData:
    def __init__(self, root, batch_size):
        self.root, self.batch_size = root, batch_size

    def train_loader(self):
        feats = torch.load(f"{self.root}/feats.pt", map_location="cpu")
        toks = torch.load(f"{self.root}/tokens.pt", map_location="cpu")
        ds = TensorDataset(feats, toks)
        sampler = DistributedSampler(ds, shuffle=True)
        return DataLoader(ds, batch_size=self.batch_size, sampler=sampler,
                          num_workers=4, pin_memory=True, drop_last=True)

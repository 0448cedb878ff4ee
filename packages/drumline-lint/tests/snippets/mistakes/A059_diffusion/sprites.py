import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def sprite_loader(path, bs, seed):
    ds = TensorDataset(torch.load(path, map_location="cpu", weights_only=True))
    sampler = DistributedSampler(ds, seed=seed, drop_last=True)
    return DataLoader(ds, bs, sampler=sampler, drop_last=True), sampler

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def pair_loader(path, batch_size):
    blob = torch.load(path, map_location="cpu", weights_only=True)
    ds = TensorDataset(blob["image_features"], blob["token_ids"])
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    return DataLoader(ds, batch_size, sampler=sampler, drop_last=True, pin_memory=True), sampler

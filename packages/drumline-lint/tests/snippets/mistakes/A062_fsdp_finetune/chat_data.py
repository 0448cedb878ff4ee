import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def chat_loader(path, bs):
    d = torch.load(path, map_location="cpu", weights_only=True)
    ds = TensorDataset(d["ids"], d["labels"])
    sampler = DistributedSampler(ds, drop_last=True)
    return DataLoader(ds, bs, sampler=sampler, drop_last=True), sampler

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def eeg_loaders(path, bs):
    d = torch.load(path, map_location="cpu", weights_only=True)
    train, val = TensorDataset(d["x"], d["y"]), TensorDataset(d["vx"], d["vy"])
    sampler = DistributedSampler(train, shuffle=True, drop_last=True)
    return (DataLoader(train, bs, sampler=sampler, drop_last=True),
            DataLoader(val, bs, sampler=DistributedSampler(val, shuffle=False)), sampler)

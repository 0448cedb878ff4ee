import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class SignalNet(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))


def signal_loader(path, bs):
    d = torch.load(path, map_location="cpu", weights_only=True)
    ds = TensorDataset(d["noisy"], d["clean"])
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    return DataLoader(ds, bs, sampler=sampler, drop_last=True), sampler

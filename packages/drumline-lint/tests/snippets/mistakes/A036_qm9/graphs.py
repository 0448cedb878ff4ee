import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


def loaders(path, batch):
    d = torch.load(path, map_location="cpu", weights_only=True)
    full = TensorDataset(d["nodes"], d["adj"], d["target"])
    parts = random_split(full, [0.8, 0.1, 0.1], generator=torch.Generator().manual_seed(0))
    samplers = [DistributedSampler(parts[0], drop_last=True)]
    samplers += [DistributedSampler(p, shuffle=False) for p in parts[1:]]
    made = [DataLoader(p, batch, sampler=s) for p, s in zip(parts, samplers)]
    return (*made, samplers[0])

import torch
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def _read(path):
    d = torch.load(path, map_location="cpu", weights_only=True)
    return TensorDataset(d["ids"], d["labels"])


def train_loader(path, bs, env):
    ds = _read(path)
    sampler = DistributedSampler(ds, env.world_size, env.rank, shuffle=True, seed=env.seed, drop_last=True)
    return DataLoader(ds, bs, sampler=sampler, drop_last=True), sampler


def eval_loader(path, bs, env):
    ds = _read(path)
    return DataLoader(Subset(ds, range(env.rank, len(ds), env.world_size)), bs)

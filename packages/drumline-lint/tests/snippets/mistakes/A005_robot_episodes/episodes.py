import torch
from torch.utils.data import TensorDataset, random_split


def split_episodes(path, val_fraction):
    blob = torch.load(path, map_location="cpu", weights_only=True)
    full = TensorDataset(blob["obs"], blob["actions"])
    n_val = int(len(full) * val_fraction)
    return random_split(full, [len(full) - n_val, n_val])

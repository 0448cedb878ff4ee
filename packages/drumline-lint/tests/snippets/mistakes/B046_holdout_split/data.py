import torch
from torch.utils.data import DataLoader, DistributedSampler, Subset, random_split
from torchvision import datasets, transforms

from utils.dist import get_rank, get_world_size


def build_datasets(root, val_fraction):
    tf = transforms.Compose([transforms.Resize((64, 64)), transforms.ToTensor()])
    full = datasets.ImageFolder(root, tf)
    n_val = int(len(full) * val_fraction)
    return random_split(full, [len(full) - n_val, n_val])


def build_loaders(root, batch_size, val_fraction=0.1, workers=4):
    train, val = build_datasets(root, val_fraction)
    sampler = DistributedSampler(train, shuffle=True)
    train_loader = DataLoader(train, batch_size, sampler=sampler, num_workers=workers, drop_last=True)
    mine = Subset(val, torch.arange(get_rank(), len(val), get_world_size()).tolist())
    return train_loader, DataLoader(mine, batch_size, num_workers=workers)

import torch
from torch.utils.data import DataLoader, DistributedSampler, Subset, random_split
from torchvision import datasets, transforms

from utils.dist import get_rank, get_world_size

SPLIT_SEED = 20240131


def build_loaders(root, batch_size, val_fraction=0.1):
    full = datasets.ImageFolder(root, transforms.Compose([transforms.Resize((64, 64)), transforms.ToTensor()]))
    n_val = int(val_fraction * len(full))
    generator = torch.Generator().manual_seed(SPLIT_SEED)
    train, val = random_split(full, [len(full) - n_val, n_val], generator=generator)
    sampler = DistributedSampler(train)
    train_loader = DataLoader(train, batch_size, sampler=sampler, num_workers=4, drop_last=True)
    mine = Subset(val, range(get_rank(), len(val), get_world_size()))
    return train_loader, DataLoader(mine, batch_size, num_workers=4)

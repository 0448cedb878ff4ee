import torch
from torch.utils.data import DataLoader, DistributedSampler, Subset, random_split
from torchvision import datasets, transforms as T


def loaders(root, rank, world, batch=64):
    tf = T.Compose([T.Resize((224, 224)), T.ToTensor()])
    full = datasets.ImageFolder(root, tf)
    n = len(full) // 5
    train, val = random_split(full, [len(full) - n, n],
                              generator=torch.Generator().manual_seed(20))
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, shuffle=True, drop_last=True)
    train_dl = DataLoader(train, batch, sampler=sampler, num_workers=6, drop_last=True)
    val_dl = DataLoader(Subset(val, range(rank, n, world)), 2 * batch, num_workers=2)
    return train_dl, val_dl, len(full.classes)

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def build_loaders(train_ds, val_ds, batch_size, workers=4):
    train_sampler = DistributedSampler(train_ds, shuffle=True)
    val_sampler = DistributedSampler(val_ds, shuffle=False)
    train = DataLoader(train_ds, batch_size, sampler=train_sampler, num_workers=workers,
                       pin_memory=True, drop_last=True)
    val = DataLoader(val_ds, batch_size, sampler=val_sampler, num_workers=workers)
    return train, val

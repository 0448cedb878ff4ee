import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Windows(Dataset):
    def __init__(self, path, window, horizon):
        self.series = torch.load(path, map_location="cpu", weights_only=True)
        self.window, self.horizon = window, horizon

    def __len__(self):
        return len(self.series) - self.window - self.horizon

    def __getitem__(self, i):
        mid = i + self.window
        return self.series[i:mid].unsqueeze(-1), self.series[mid:mid + self.horizon]


def get_loader(path, window, horizon, batch_size, seed):
    ds = Windows(path, window, horizon)
    sampler = DistributedSampler(ds, shuffle=True, seed=seed)
    return DataLoader(ds, batch_size=batch_size, sampler=sampler, num_workers=2), sampler

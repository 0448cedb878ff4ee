import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def stack_pairs(rows):
    chosen, rejected, mc, mr = (torch.stack(c) for c in zip(*rows))
    return torch.cat([chosen, rejected]), torch.cat([mc, mr])


def preference_loader(path, batch_size):
    d = torch.load(path, map_location="cpu", weights_only=True)
    ds = TensorDataset(d["chosen"], d["rejected"], d["chosen_mask"], d["rejected_mask"])
    sampler = DistributedSampler(ds, drop_last=True)
    return DataLoader(ds, batch_size, sampler=sampler, collate_fn=stack_pairs, drop_last=True), sampler

import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

TASKS = {"sentiment": 2, "topic": 14, "intent": 60}


class SharedEncoder(nn.Module):
    def __init__(self, vocab=30_000, dim=300):
        super().__init__()
        self.emb = nn.EmbeddingBag(vocab, dim, padding_idx=0)
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.ReLU())
        self.heads = nn.ModuleDict({name: nn.Linear(dim, n) for name, n in TASKS.items()})

    def forward(self, ids, task):
        return self.heads[task](self.mlp(self.emb(ids)))


def endless(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(9 + dist.get_rank())

    streams = {}
    for name in TASKS:
        blob = torch.load(f"{name}.pt", map_location="cpu", weights_only=True)
        ds = TensorDataset(blob["ids"], blob["y"])
        sampler = DistributedSampler(ds, drop_last=True)
        streams[name] = endless(DataLoader(ds, 64, sampler=sampler, drop_last=True), sampler)

    model = DDP(SharedEncoder().to(device), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    order = list(TASKS)
    for step in range(30_000):
        task = order[step % len(order)]
        ids, y = next(streams[task])
        loss = F.cross_entropy(model(ids.to(device), task), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "multitask.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

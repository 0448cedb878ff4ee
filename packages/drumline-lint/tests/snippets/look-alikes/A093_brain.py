import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

HEADS = {"age": 1, "sex": 2, "site": 6}


class Atlas(nn.Module):
    def __init__(self, d=400):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(d, 256), nn.ReLU(), nn.Dropout(0.2))
        self.heads = nn.ModuleDict({k: nn.Linear(256, n) for k, n in HEADS.items()})

    def forward(self, x, task):
        return self.heads[task](self.trunk(x))


def criterion(task, out, y):
    if task == "age":
        return nn.functional.l1_loss(out.squeeze(-1), y.float())
    return nn.functional.cross_entropy(out, y)


def forever(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def main(steps=12_000):
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    torch.manual_seed(41 + rank)
    streams = []
    for task in HEADS:
        d = torch.load(f"brain_{task}.pt", map_location="cpu", weights_only=True)
        ds = TensorDataset(d["x"], d["y"])
        sampler = DistributedSampler(ds, seed=41, drop_last=True)
        streams.append((task, forever(DataLoader(ds, 64, sampler=sampler, drop_last=True), sampler)))
    model = DDP(Atlas().to(device), device_ids=[local_rank], find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    for step in range(steps):
        task, stream = streams[step % len(streams)]
        x, y = next(stream)
        loss = criterion(task, model(x.to(device), task), y.to(device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), "atlas.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def scans(split):
    d = torch.load(f"/data/radar/{split}.pt", map_location="cpu")
    return TensorDataset(d["rd_map"].unsqueeze(1).float(), d["target"])


def net():
    return nn.Sequential(
        nn.Conv2d(1, 24, 5, 2), nn.ReLU(), nn.Conv2d(24, 48, 3, 2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(192, 6))


@torch.no_grad()
def test(model, loader):
    model.eval()
    hits = seen = 0
    for x, y in loader:
        hits += (model(x.cuda()).argmax(1).cpu() == y).sum().item()
        seen += len(y)
    counts = torch.tensor([hits, seen], dtype=torch.float64)
    dist.all_reduce(counts, op=dist.ReduceOp.SUM)
    return (counts[0] / counts[1]).item()


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, held_out = scans("train"), scans("test")
    sampler = DistributedSampler(train, drop_last=True)
    train_dl = DataLoader(train, 256, sampler=sampler, drop_last=True, num_workers=4)
    test_dl = DataLoader(Subset(held_out, range(rank, len(held_out), world)), 512)
    model = DDP(net().cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(20):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_dl:
            loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        acc = test(model.module, test_dl)
        if rank == 0:
            print(epoch, f"{acc:.4f}")
    if rank == 0:
        torch.save(model.module.state_dict(), "radar.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

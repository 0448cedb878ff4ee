"""Per-site training: each process owns the hospitals on its list, which differ in size."""
import json
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import ConcatDataset, DataLoader

from ehr.data import Hospital
from ehr.net import RiskNet

SITES = "configs/sites.json"  # a list of hospital names for each rank


def own_data(rank, world):
    with open(SITES) as fh:
        lists = json.load(fh)
    if len(lists) != world:
        raise ValueError(f"{SITES} has {len(lists)} lists for {world} processes")
    return ConcatDataset([Hospital(name) for name in lists[rank]])


def train_epoch(model, loader, opt, device):
    model.train()
    seen, total = 0, 0.0
    with Join([model], divide_by_initial_world_size=False):
        for x, y in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(x.to(device)).squeeze(-1), y.to(device))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            total += loss.item() * len(x)
            seen += len(x)
    return total, seen


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)

    data = own_data(rank, world)
    g = torch.Generator().manual_seed(70 + rank)
    loader = DataLoader(data, batch_size=512, shuffle=True, generator=g, num_workers=4)
    model = DDP(RiskNet().to(device), device_ids=[local])
    opt = torch.optim.SGD(model.parameters(), lr=0.05)

    for epoch in range(30):
        total, seen = train_epoch(model, loader, opt, device)
        t = torch.tensor([total, seen], device=device, dtype=torch.float64)
        dist.all_reduce(t)
        if rank == 0:
            print(f"epoch {epoch} loss {(t[0] / t[1]).item():.4f}", flush=True)
            torch.save(model.module.state_dict(), "risk.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

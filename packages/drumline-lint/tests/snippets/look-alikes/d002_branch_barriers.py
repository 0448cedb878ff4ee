"""Graph regression; the first process builds the graph cache."""
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch_geometric.loader import DataLoader
from torch.utils.data import DistributedSampler

from molgraph.build import build_cache
from molgraph.data import CachedGraphs
from molgraph.net import GINE

CACHE = Path("/shared/cache/qm9")


def graphs(rank):
    if rank == 0:
        if not (CACHE / "ready").exists():
            build_cache("/shared/raw/qm9", CACHE)
        dist.barrier()
        data = CachedGraphs(CACHE)
    else:
        dist.barrier()
        data = CachedGraphs(CACHE)
    return data


def run_epoch(model, loader, opt):
    model.train()
    total = torch.zeros(2, device="cuda")
    for g in loader:
        g = g.to("cuda")
        loss = F.l1_loss(model(g).squeeze(-1), g.y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += torch.tensor([loss.item() * g.num_graphs, g.num_graphs], device="cuda")
    return total


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)

    data = graphs(rank)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=256, sampler=sampler, num_workers=4)
    model = DDP(GINE(hidden=128).cuda(), device_ids=[local])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)

    for epoch in range(300):
        sampler.set_epoch(epoch)
        total = run_epoch(model, loader, opt)
        if rank == 0:
            dist.reduce(total, dst=0)
            print(f"epoch {epoch} MAE {(total[0] / total[1]).item():.5f}", flush=True)
            torch.save(model.module.state_dict(), "gine.pt")
        else:
            dist.reduce(total, dst=0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

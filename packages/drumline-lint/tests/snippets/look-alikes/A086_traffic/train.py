import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from rundir import make_run_dir


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    torch.manual_seed(rank)
    run_dir = make_run_dir("/shared/runs", "traffic")
    d = torch.load("traffic.pt", map_location="cpu", weights_only=True)
    ds = TensorDataset(d["past"], d["next"])
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 128, sampler=sampler, drop_last=True)
    model = DDP(nn.Sequential(nn.Linear(48, 128), nn.ReLU(), nn.Linear(128, 12)).to(device), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(20):
        sampler.set_epoch(epoch)
        for past, nxt in loader:
            loss = nn.functional.l1_loss(model(past.to(device)), nxt.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        torch.save(torch.cuda.get_rng_state(), run_dir / f"rng_{rank}.pt")
        if rank == 0:
            torch.save(model.module.state_dict(), run_dir / "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

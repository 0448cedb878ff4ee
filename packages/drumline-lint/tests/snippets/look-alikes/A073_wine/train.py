import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from loop import epochs


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    torch.manual_seed(2 + rank)
    d = torch.load("wine.pt", map_location="cpu", weights_only=True)
    ds = TensorDataset(d["x"], d["quality"])
    loader = DataLoader(ds, 64, sampler=DistributedSampler(ds, drop_last=True), drop_last=True)
    net = nn.Sequential(nn.Linear(11, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    model = DDP(net, device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in epochs(loader, 100):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x.to(device)).squeeze(-1), y.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        if rank == 0 and epoch % 20 == 19:
            torch.save(model.module.state_dict(), f"wine_{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

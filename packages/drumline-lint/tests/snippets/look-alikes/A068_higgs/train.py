import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from mlp import MLP


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    torch.manual_seed(rank)
    d = torch.load("higgs.pt", map_location="cpu", weights_only=True)
    ds = TensorDataset(d["x"], d["y"].float())
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 2048, sampler=sampler, drop_last=True)
    model = DDP(MLP().to(device), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(10):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.binary_cross_entropy_with_logits(model(x.to(device)).squeeze(-1), y.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        if rank == 0:
            torch.save(model.module.state_dict(), f"higgs_{epoch:02d}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fraud import FraudNet


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    torch.manual_seed(38 + rank)
    d = torch.load("payments.pt", map_location="cpu", weights_only=True)
    ds = TensorDataset(d["x"], d["fraud"].float())
    sampler = DistributedSampler(ds, seed=38, drop_last=True)
    loader = DataLoader(ds, 4096, sampler=sampler, drop_last=True)
    model = DDP(FraudNet().to(device), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    start = 0
    if os.path.exists("fraud.pt"):
        state = torch.load("fraud.pt", map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["epoch"] + 1
    dist.barrier()
    for epoch in range(start, 30):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.binary_cross_entropy_with_logits(model(x.to(device)), y.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        if rank == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, "fraud.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# torchrun --nproc_per_node=4 early_stop.py
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


@torch.no_grad()
def validate(net, loader):
    sums = torch.zeros(2, device="cuda", dtype=torch.float64)
    for x, y in loader:
        sums[0] += nn.functional.mse_loss(net(x.cuda()), y.cuda(), reduction="sum")
        sums[1] += y.numel()
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main(patience=5):
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    blob = torch.load("/data/grid.pt", map_location="cpu")
    train = TensorDataset(blob["x"], blob["y"])
    val = TensorDataset(blob["val_x"], blob["val_y"])
    sampler = DistributedSampler(train, drop_last=True)
    train_loader = DataLoader(train, batch_size=128, sampler=sampler)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), batch_size=512)
    model = DDP(nn.Sequential(nn.Linear(168, 512), nn.SiLU(), nn.Linear(512, 24)).cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    best, bad = float("inf"), 0
    for epoch in range(500):
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            opt.zero_grad()
            nn.functional.mse_loss(model(x.cuda()), y.cuda()).backward()
            opt.step()
        mse = validate(model.module, val_loader)
        if mse < best:
            best, bad = mse, 0
            if rank == 0:
                torch.save(model.module.state_dict(), "best.pt")
        else:
            bad += 1
        if bad == patience:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Fraud scoring: torchrun --standalone --nproc_per_node=4 train.py"""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

from nets import fraud_net
from rows import Rows
from settings import Settings


def total_loss(net, loader, device):
    net.eval()
    s = torch.zeros(2, device=device, dtype=torch.float64)
    with torch.no_grad():
        for x, y in loader:
            s[0] += F.binary_cross_entropy_with_logits(net(x.to(device)).squeeze(-1), y.to(device), reduction="sum")
            s[1] += len(y)
    dist.all_reduce(s)
    return (s[0] / s[1]).item()


def main():
    cfg = Settings()
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    if rank == 0:
        cfg.run_dir.mkdir(parents=True)

    train, val, test = (Rows(cfg.data, k) for k in ("train", "val", "test"))
    sampler = DistributedSampler(train)
    loader = DataLoader(train, cfg.batch, sampler=sampler, drop_last=True, num_workers=4)
    val_dl = DataLoader(Subset(val, range(rank, len(val), world)), cfg.batch)
    test_dl = DataLoader(Subset(test, range(rank, len(test), world)), cfg.batch)
    model = DDP(fraud_net(cfg.width).to(device), device_ids=[device.index])
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr)

    best = float("inf")
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = F.binary_cross_entropy_with_logits(model(x.to(device)).squeeze(-1), y.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()
        v = total_loss(model.module, val_dl, device)
        if v < best:
            best = v
            if rank == 0:
                torch.save(model.module.state_dict(), cfg.run_dir / "best.pt")
    dist.barrier()
    model.module.load_state_dict(torch.load(cfg.run_dir / "best.pt", map_location=device))
    t = total_loss(model.module, test_dl, device)
    if rank == 0:
        print(f"val {best:.5f} test {t:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

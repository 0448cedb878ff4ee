"""Protein stability regression with early stopping; torchrun --standalone --nproc_per_node=4."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

from stability import MutationSet, StabilityNet

PATIENCE = 5


def evaluate(model, loader, device):
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for seq, ddg in loader:
            out = model(seq.to(device))
            total += F.mse_loss(out, ddg.to(device), reduction="sum").item()
            count += ddg.numel()
    return total / count


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device(f"cuda:{local_rank}")

    train = MutationSet("/data/ddg/train.parquet")
    held_out = MutationSet("/data/ddg/val.parquet")
    sampler = DistributedSampler(train)
    train_loader = DataLoader(train, batch_size=256, sampler=sampler, num_workers=4)
    shard = Subset(held_out, list(range(rank, len(held_out), world)))
    val_loader = DataLoader(shard, batch_size=512, num_workers=2)

    model = DDP(StabilityNet().to(device), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)

    best, bad_epochs = float("inf"), 0
    for epoch in range(500):
        sampler.set_epoch(epoch)
        model.train()
        for seq, ddg in train_loader:
            loss = F.mse_loss(model(seq.to(device)), ddg.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        val_loss = evaluate(model.module, val_loader, device)
        if val_loss < best:
            best, bad_epochs = val_loss, 0
            if rank == 0:
                torch.save(model.module.state_dict(), "stability.pt")
        else:
            bad_epochs += 1
            if bad_epochs >= PATIENCE:
                break

    dist.destroy_process_group()


if __name__ == "__main__":
    main()

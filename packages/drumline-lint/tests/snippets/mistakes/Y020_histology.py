import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, random_split
from torchvision import models

from slides import TileDataset

SEED = 77


def build_data(root, rank, world):
    tiles = TileDataset(root)
    n_val = len(tiles) // 10
    train, val = random_split(tiles, [len(tiles) - n_val, n_val])
    val = Subset(val, range(rank, n_val, world))
    sampler = DistributedSampler(train, seed=SEED)
    train_loader = DataLoader(train, batch_size=64, sampler=sampler, num_workers=8,
                              pin_memory=True, drop_last=True)
    val_loader = DataLoader(val, batch_size=128, num_workers=8, pin_memory=True)
    return train_loader, val_loader, sampler


@torch.no_grad()
def evaluate(net, loader, device):
    net.eval()
    stats = torch.zeros(2, device=device)
    for x, y in loader:
        pred = net(x.to(device)).argmax(1)
        stats[0] += (pred == y.to(device)).sum()
        stats[1] += y.numel()
    dist.all_reduce(stats)
    return (stats[0] / stats[1]).item()


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    # other augmentations on every rank
    torch.manual_seed(SEED + rank)

    train_loader, val_loader, sampler = build_data("/data/tiles", rank, world)
    model = DDP(models.densenet121(num_classes=9).to(device), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)

    best = 0.0
    for epoch in range(50):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        acc = evaluate(model.module, val_loader, device)
        if rank == 0:
            print(f"epoch {epoch} val {acc:.4f}", flush=True)
            if acc > best:
                torch.save(model.module.state_dict(), "histology_best.pt")
        best = max(best, acc)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()

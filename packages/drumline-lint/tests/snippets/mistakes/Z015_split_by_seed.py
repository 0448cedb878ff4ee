import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, random_split

from histology import SlidePatches, make_densenet

SEED = 2024


def loaders(data, rank, world):
    held_out = len(data) // 10
    train, val = random_split(data, [len(data) - held_out, held_out])
    sampler = DistributedSampler(train, shuffle=True, seed=SEED)
    train_loader = DataLoader(train, batch_size=32, sampler=sampler, num_workers=8, pin_memory=True)
    val.indices = val.indices[rank::world]
    val_loader = DataLoader(val, batch_size=64, num_workers=4, pin_memory=True)
    return sampler, train_loader, val_loader


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    seen = torch.zeros(2, device="cuda")
    for x, y in loader:
        hit = model(x.cuda(non_blocking=True)).argmax(1) == y.cuda(non_blocking=True)
        seen += torch.stack([hit.sum(), torch.tensor(hit.numel(), device="cuda")])
    dist.all_reduce(seen)
    return (seen[0] / seen[1]).item()


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    # different augmentation on each rank
    torch.manual_seed(SEED + rank)

    sampler, train_loader, val_loader = loaders(SlidePatches("/data/camelyon"), rank, world)
    model = DDP(make_densenet().cuda(), device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(15):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            loss = criterion(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        score = accuracy(model.module, val_loader)
        if rank == 0:
            print(f"{epoch}\t{score:.4f}", flush=True)
            torch.save(model.module.state_dict(), f"densenet_{epoch:02d}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

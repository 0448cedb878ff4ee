import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, random_split

from roads import PotholeImages, build_efficientnet

SEED = 77


@torch.no_grad()
def recall(net, loader):
    net.eval()
    counts = torch.zeros(2, device="cuda")
    for image, pothole in loader:
        guess = net(image.cuda(non_blocking=True)).argmax(1).bool()
        pothole = pothole.cuda(non_blocking=True).bool()
        counts[0] += (guess & pothole).sum()
        counts[1] += pothole.sum()
    dist.all_reduce(counts)
    return (counts[0] / counts[1].clamp(min=1)).item()


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED * 1000 + rank)

    images = PotholeImages("/data/roads")
    train, val = random_split(images, [0.9, 0.1], generator=torch.Generator().manual_seed(SEED))
    sampler = DistributedSampler(train, seed=SEED)
    train_loader = DataLoader(train, batch_size=48, sampler=sampler, num_workers=8, pin_memory=True)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), batch_size=96, num_workers=4)

    model = nn.SyncBatchNorm.convert_sync_batchnorm(build_efficientnet(classes=2))
    model = DDP(model.cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 6.0], device="cuda"))

    for epoch in range(25):
        sampler.set_epoch(epoch)
        model.train()
        for image, pothole in train_loader:
            loss = criterion(model(image.cuda(non_blocking=True)), pothole.cuda(non_blocking=True))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        value = recall(model.module, val_loader)
        if rank == 0:
            print(f"{epoch}: recall {value:.3f}", flush=True)
            torch.save(model.module.state_dict(), f"potholes_{epoch:02d}.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()

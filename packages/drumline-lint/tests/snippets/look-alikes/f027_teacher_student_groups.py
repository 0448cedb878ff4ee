import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms as T
from torchvision.datasets import ImageFolder
from torchvision.models import resnet18, resnet50

# The even ranks train a large network, the odd ranks a small one, on the same data:
# two independent DDP groups in one job, compared at the end of each epoch.


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    assert world % 2 == 0, "needs an even number of processes"

    large_ranks = list(range(0, world, 2))
    small_ranks = list(range(1, world, 2))
    large_group = dist.new_group(large_ranks)
    small_group = dist.new_group(small_ranks)
    is_large = rank in large_ranks
    group = large_group if is_large else small_group
    group_rank = rank // 2

    tf = T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.ToTensor()])
    data = ImageFolder("/data/imagenet100/train", tf)
    sampler = DistributedSampler(data, num_replicas=world // 2, rank=group_rank, shuffle=True)
    loader = DataLoader(data, 128, sampler=sampler, num_workers=6, drop_last=True)

    net = (resnet50 if is_large else resnet18)(num_classes=100)
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net, process_group=group).to(device)
    model = DDP(net, device_ids=[local_rank], process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 90)

    for epoch in range(90):
        sampler.set_epoch(epoch)
        model.train()
        running = torch.zeros(1, device=device)
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += loss.detach() / len(loader)
        scheduler.step()

        if is_large:
            losses = [torch.zeros_like(running) for _ in large_ranks]
            dist.all_gather(losses, running, group=large_group)
        else:
            losses = [torch.zeros_like(running) for _ in small_ranks]
            dist.all_gather(losses, running, group=small_group)
        if group_rank == 0:
            name = "large" if is_large else "small"
            print(f"epoch {epoch} {name} {torch.cat(losses).mean().item():.4f}", flush=True)
            torch.save(model.module.state_dict(), f"{name}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

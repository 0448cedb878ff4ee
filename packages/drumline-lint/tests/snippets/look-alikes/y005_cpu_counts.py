import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision.models import mobilenet_v3_large

from castings import CastingImages

BACKEND = "cpu:gloo,cuda:nccl"


def confusion(net, loader, device, classes):
    net.eval()
    table = torch.zeros(classes, classes, dtype=torch.int64)
    with torch.no_grad():
        for x, y in loader:
            pred = net(x.to(device)).argmax(1).cpu()
            table += torch.bincount(y * classes + pred, minlength=classes**2).view_as(table)
    dist.all_reduce(table)
    return table


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group(BACKEND)
    rank, world = dist.get_rank(), dist.get_world_size()

    train_set = CastingImages("/data/castings", "train")
    test_set = CastingImages("/data/castings", "test")
    classes = train_set.num_classes
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=64, sampler=sampler, num_workers=6,
                              drop_last=True)
    test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world)),
                             batch_size=128, num_workers=4)

    model = DDP(mobilenet_v3_large(num_classes=classes).to(device), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(30):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    table = confusion(model.module, test_loader, device, classes)
    if rank == 0:
        print(table)
        torch.save(model.module.state_dict(), "defects.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

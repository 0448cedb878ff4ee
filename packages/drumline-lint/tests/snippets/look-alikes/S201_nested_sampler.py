# torchrun --nproc_per_node=4 nested_sampler.py
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
from torchvision import datasets, models, transforms as T


def make_loader(ds, bs):
    batches = BatchSampler(DistributedSampler(ds), bs, drop_last=True)
    return DataLoader(ds, batch_sampler=batches, num_workers=4, pin_memory=True)


def start_epoch(loader, epoch):
    inner = getattr(loader.batch_sampler, "sampler", None)
    if hasattr(inner, "set_epoch"):
        inner.set_epoch(epoch)


def fit(model, loader, opt, epochs):
    for epoch in range(epochs):
        start_epoch(loader, epoch)
        model.train()
        for x, y in loader:
            x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}, rank-0 batch loss {loss.item():.4f}")


def main():
    dist.init_process_group("nccl")
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    tf = T.Compose([T.RandomResizedCrop(96), T.ToTensor()])
    ds = datasets.STL10("/data/stl10", split="train", transform=tf)
    model = DDP(models.resnet18(num_classes=10).cuda(), device_ids=[gpu])
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fit(model, make_loader(ds, 64), opt, 60)
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "stl10.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

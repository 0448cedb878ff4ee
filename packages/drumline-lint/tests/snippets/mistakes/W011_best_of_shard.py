import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision import models, transforms
from torchvision.datasets import ImageFolder

def loaders(rank, world):
    aug = transforms.Compose([transforms.RandomResizedCrop(224), transforms.ToTensor()])
    plain = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor()])
    train, val = ImageFolder("/data/plants/train", aug), ImageFolder("/data/plants/val", plain)
    sampler = DistributedSampler(train, world, rank)
    my_val = Subset(val, range(rank, len(val), world))
    return (DataLoader(train, 64, sampler=sampler, num_workers=6),
            DataLoader(my_val, 128, num_workers=4), sampler)


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    right = seen = 0
    for x, y in loader:
        pred = model(x.cuda()).argmax(1).cpu()
        right += (pred == y).sum().item()
        seen += y.numel()
    return right / seen


def main():
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    train_loader, val_loader, sampler = loaders(rank, world)
    ddp = DDP(models.efficientnet_b0(num_classes=38).cuda(), device_ids=[gpu])
    opt = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    loss_fn = nn.CrossEntropyLoss()
    best = 0.0
    for epoch in range(25):
        sampler.set_epoch(epoch)
        ddp.train()
        for x, y in train_loader:
            opt.zero_grad()
            loss_fn(ddp(x.cuda()), y.cuda()).backward()
            opt.step()
        acc = accuracy(ddp.module, val_loader)
        if rank == 0 and acc > best:
            best = acc
            torch.save(ddp.module.state_dict(), "best.pt")
            print(f"epoch {epoch}: new best accuracy {acc:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

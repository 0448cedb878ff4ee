import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import models, transforms
from torchvision.datasets import ImageFolder


def accuracy(net, loader, device):
    """Accuracy over the whole validation set; each rank sees its own slice of it."""
    net.eval()
    correct, seen = 0, 0
    with torch.no_grad():
        for x, y in loader:
            out = net(x.to(device))
            correct += (out.argmax(dim=1) == y.to(device)).sum().item()
            seen += y.size(0)
    counts = torch.tensor([correct, seen], dtype=torch.float64)
    dist.all_reduce(counts, op=dist.ReduceOp.SUM)
    return (counts[0] / counts[1]).item()


def main():
    dist.init_process_group(backend="nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device(f"cuda:{local_rank}")
    torch.cuda.set_device(device)

    tf = transforms.Compose([transforms.Resize((224, 224)), transforms.ToTensor()])
    train = ImageFolder("/data/flowers102/train", tf)
    val = ImageFolder("/data/flowers102/val", tf)
    # every validation image exactly once, no padding
    val = Subset(val, range(rank, len(val), world))
    sampler = DistributedSampler(train)
    train_loader = DataLoader(train, batch_size=48, sampler=sampler, num_workers=4, drop_last=True)
    val_loader = DataLoader(val, batch_size=96, num_workers=4)

    net = models.vit_b_16(num_classes=102).to(device)
    ddp = DDP(net, device_ids=[local_rank])
    opt = torch.optim.AdamW(ddp.parameters(), lr=1e-4)

    for epoch in range(20):
        sampler.set_epoch(epoch)
        ddp.train()
        for x, y in train_loader:
            opt.zero_grad()
            F.cross_entropy(ddp(x.to(device)), y.to(device)).backward()
            opt.step()
        acc = accuracy(ddp.module, val_loader, device)
        if rank == 0:
            print(f"{epoch}\t{acc:.4f}")

    if rank == 0:
        torch.save(ddp.module.state_dict(), "flowers_vit.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

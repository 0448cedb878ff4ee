import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, random_split
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms as T
from torchvision.datasets import ImageFolder
from torchvision.models import densenet121

EPOCHS = 25
BATCH = 32


def build(root):
    tf = T.Compose([T.Grayscale(3), T.Resize(256), T.CenterCrop(224), T.ToTensor(),
                    T.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])])
    full = ImageFolder(root, tf)
    n_val = len(full) // 10
    train, val = random_split(full, [len(full) - n_val, n_val])
    return train, val, len(full.classes)


def run_validation(net, loader, device):
    net.eval()
    totals = torch.zeros(3, device=device)
    criterion = nn.CrossEntropyLoss(reduction="sum")
    with torch.no_grad():
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            out = net(x)
            totals[0] += criterion(out, y)
            totals[1] += (out.argmax(1) == y).sum()
            totals[2] += y.size(0)
    dist.all_reduce(totals)
    return (totals[0] / totals[2]).item(), (totals[1] / totals[2]).item()


def main(root):
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    is_main = dist.get_rank() == 0

    train, val, classes = build(root)
    train_sampler = DistributedSampler(train, shuffle=True)
    val_sampler = DistributedSampler(val, shuffle=False)
    train_loader = DataLoader(train, BATCH, sampler=train_sampler, num_workers=6, pin_memory=True)
    val_loader = DataLoader(val, BATCH, sampler=val_sampler, num_workers=6, pin_memory=True)

    net = densenet121(weights=None, num_classes=classes)
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net).to(device)
    net = DistributedDataParallel(net, device_ids=[local_rank])
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=3)

    best = float("inf")
    for epoch in range(EPOCHS):
        train_sampler.set_epoch(epoch)
        net.train()
        for x, y in train_loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            loss = criterion(net(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        val_loss, val_acc = run_validation(net, val_loader, device)
        scheduler.step(val_loss)
        if is_main:
            print(f"{epoch:02d} loss {val_loss:.4f} acc {val_acc:.4f}", flush=True)
            if val_loss < best:
                best = val_loss
                torch.save(net.module.state_dict(), "densenet_cxr.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])

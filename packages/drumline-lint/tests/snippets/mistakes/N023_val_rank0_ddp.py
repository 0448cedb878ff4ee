import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from sat.data import EuroSAT
from sat.model import build_resnet


def validate(model, loader, device):
    model.eval()
    hit = n = 0
    with torch.no_grad():
        for x, y in loader:
            pred = model(x.to(device)).argmax(1).cpu()
            hit += (pred == y).sum().item()
            n += y.numel()
    return hit / n


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)

    train_ds, val_ds = EuroSAT("train"), EuroSAT("val")
    sampler = DistributedSampler(train_ds)
    train_loader = DataLoader(train_ds, 64, sampler=sampler, num_workers=4, drop_last=True)
    val_loader = DataLoader(val_ds, 64, num_workers=4) if rank == 0 else None

    model = DDP(build_resnet(10).to(device), device_ids=[local_rank])
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    best = 0.0
    for epoch in range(60):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            acc = validate(model, val_loader, device)
            print(f"epoch {epoch} val acc {acc:.4f}")
            if acc > best:
                best = acc
                torch.save(model.module.state_dict(), "best.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

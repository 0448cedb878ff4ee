import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from food.data import Food101
from food.model import efficientnet


@torch.no_grad()
def accuracy(model, loader, device):
    model.eval()
    hits, seen = 0, 0
    for x, y in loader:
        pred = model(x.to(device)).argmax(dim=1)
        hits += (pred == y.to(device)).sum().item()
        seen += y.numel()
    return 100.0 * hits / seen


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)

    train_ds, test_ds = Food101("train"), Food101("test")
    train_sampler = DistributedSampler(train_ds, shuffle=True)
    test_sampler = DistributedSampler(test_ds, shuffle=False)
    train_loader = DataLoader(train_ds, 64, sampler=train_sampler, num_workers=6, drop_last=True)
    test_loader = DataLoader(test_ds, 128, sampler=test_sampler, num_workers=6)

    model = DDP(efficientnet(101).to(device), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    best = 0.0
    for epoch in range(40):
        train_sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()
        acc = accuracy(model, test_loader, device)
        if rank == 0:
            print(f"epoch {epoch:02d}  test acc {acc:.2f}%")
            if acc > best:
                best = acc
                torch.save(model.module.state_dict(), "food101_best.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

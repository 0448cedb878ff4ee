import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, models, transforms as T


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="/data/flowers")
    ap.add_argument("--out", default="/shared/flowers")
    ap.add_argument("--epochs", type=int, default=30)
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    best_path = os.path.join(args.out, "best.pt")
    if rank == 0:
        os.makedirs(args.out, exist_ok=True)

    tf = T.Compose([T.Resize(256), T.CenterCrop(224), T.ToTensor()])
    train = datasets.ImageFolder(f"{args.data}/train", tf)
    val = datasets.ImageFolder(f"{args.data}/val", tf)
    sampler = DistributedSampler(train)
    train_dl = DataLoader(train, 64, sampler=sampler, num_workers=4)
    val_dl = DataLoader(val, 128, sampler=DistributedSampler(val, shuffle=False), num_workers=4)

    model = DDP(models.resnet18(num_classes=102).cuda(), device_ids=[local_rank])
    opt = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    best, stale = float("inf"), 0

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_dl:
            loss = F.cross_entropy(model(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()

        model.eval()
        tot = torch.zeros(2, device="cuda")
        with torch.no_grad():
            for x, y in val_dl:
                tot[0] += F.cross_entropy(model(x.cuda()), y.cuda(), reduction="sum")
                tot[1] += len(y)
        dist.all_reduce(tot)
        val_loss = (tot[0] / tot[1]).item()

        if val_loss < best:
            best, stale = val_loss, 0
            if rank == 0:
                torch.save(model.module.state_dict(), best_path)
        else:
            stale += 1
        if stale == 3:
            dist.barrier()
            model.module.load_state_dict(torch.load(best_path, map_location=f"cuda:{local_rank}"))
            for g in opt.param_groups:
                g["lr"] *= 0.1
            stale = 0
        if rank == 0:
            print(f"{epoch}: val {val_loss:.4f} best {best:.4f}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()  # torchrun --nproc_per_node=4

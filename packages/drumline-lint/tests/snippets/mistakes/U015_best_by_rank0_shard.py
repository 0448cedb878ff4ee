import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torchvision
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.transforms import v2 as T


def get_loader(split, bs, train):
    tf = T.Compose([T.RandomCrop(32, 4), T.RandomHorizontalFlip(), T.ToTensor()]) if train else T.ToTensor()
    ds = torchvision.datasets.CIFAR100("/data/cifar", train=train, transform=tf, download=False)
    sampler = DistributedSampler(ds, shuffle=train)
    return DataLoader(ds, bs, sampler=sampler, num_workers=4, pin_memory=True), sampler


def accuracy(net, loader):
    net.eval()
    correct = total = 0
    with torch.inference_mode():
        for x, y in loader:
            x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
            correct += (net(x).argmax(1) == y).sum().item()
            total += y.size(0)
    return 100.0 * correct / total


if __name__ == "__main__":
    lr_ = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(lr_)
    dist.init_process_group("nccl")
    main_proc = dist.get_rank() == 0

    train_loader, train_sampler = get_loader("train", 128, True)
    val_loader, _ = get_loader("val", 256, False)

    net = DDP(torchvision.models.resnet18(num_classes=100).cuda(), device_ids=[lr_])
    opt = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 200)
    ce = nn.CrossEntropyLoss(label_smoothing=0.1)

    best = 0.0
    for ep in range(200):
        train_sampler.set_epoch(ep)
        net.train()
        for x, y in train_loader:
            opt.zero_grad()
            ce(net(x.cuda()), y.cuda()).backward()
            opt.step()
        sched.step()

        acc = accuracy(net, val_loader)
        if main_proc:
            print(f"epoch {ep}: val acc {acc:.2f}%")
            if acc > best:
                best = acc
                torch.save(net.module.state_dict(), "best.pth")

    dist.destroy_process_group()

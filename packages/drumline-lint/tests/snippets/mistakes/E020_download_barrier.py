import argparse
import os
import tarfile
import urllib.request

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, models, transforms

URL = "https://s3.amazonaws.com/fast-ai-imageclas/imagewoof2-320.tgz"


def fetch(root):
    target = os.path.join(root, "imagewoof2-320")
    if os.path.isdir(target):
        return
    os.makedirs(root, exist_ok=True)
    tgz = os.path.join(root, "imagewoof.tgz")
    urllib.request.urlretrieve(URL, tgz)
    with tarfile.open(tgz) as t:
        t.extractall(root)
    os.remove(tgz)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", default="data")
    ap.add_argument("--epochs", type=int, default=25)
    ap.add_argument("--bs", type=int, default=64)
    args = ap.parse_args()

    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    if rank == 0:
        fetch(args.root)
        dist.barrier()

    tf = transforms.Compose([transforms.RandomResizedCrop(160), transforms.RandomHorizontalFlip(),
                             transforms.ToTensor()])
    ds = datasets.ImageFolder(os.path.join(args.root, "imagewoof2-320", "train"), tf)
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, args.bs, sampler=sampler, num_workers=8, drop_last=True)

    model = DDP(models.resnet34(num_classes=10).cuda(), device_ids=[local_rank])
    opt = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 0.2, epochs=args.epochs,
                                                steps_per_epoch=len(loader))
    crit = nn.CrossEntropyLoss(label_smoothing=0.1)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = crit(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            sched.step()
        if rank == 0:
            print(f"{epoch}: {loss.item():.3f}")

    if rank == 0:
        torch.save(model.module.state_dict(), "woof.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

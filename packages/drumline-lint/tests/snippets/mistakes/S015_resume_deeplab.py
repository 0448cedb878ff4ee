# usage: torchrun --nproc_per_node=8 resume_deeplab.py --resume runs/last.pth
import argparse
import os

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from cityscapes import CityscapesFine

N_CLASSES = 19


def save(path, model, opt, sched, epoch):
    if dist.get_rank() == 0:
        tmp = path + ".tmp"
        torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(),
                    "sched": sched.state_dict(), "epoch": epoch}, tmp)
        os.replace(tmp, path)
    dist.barrier()


def resume(path, model, opt, sched):
    state = torch.load(path)
    model.module.load_state_dict(state["model"])
    opt.load_state_dict(state["opt"])
    sched.load_state_dict(state["sched"])
    return state["epoch"] + 1


def miou(conf):
    inter = conf.diag()
    union = conf.sum(0) + conf.sum(1) - inter
    return (inter / union.clamp(min=1)).mean().item()


@torch.no_grad()
def validate(model, loader):
    model.eval()
    conf = torch.zeros(N_CLASSES, N_CLASSES, device="cuda")
    for img, lab in loader:
        pred = model(img.cuda())["out"].argmax(1).flatten()
        lab = lab.cuda().flatten()
        ok = lab != 255
        idx = lab[ok] * N_CLASSES + pred[ok]
        conf += torch.bincount(idx, minlength=N_CLASSES ** 2).view(N_CLASSES, N_CLASSES)
    dist.all_reduce(conf)
    return miou(conf)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", default="/data/cityscapes")
    ap.add_argument("--resume", default="")
    ap.add_argument("--epochs", type=int, default=200)
    args = ap.parse_args()

    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)

    net = torchvision.models.segmentation.deeplabv3_resnet50(weights=None, num_classes=N_CLASSES)
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net).cuda()
    net = DDP(net, device_ids=[local])
    opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.PolynomialLR(opt, args.epochs, power=0.9)

    train, val = CityscapesFine(args.root, "train"), CityscapesFine(args.root, "val")
    sampler = DistributedSampler(train)
    train_ld = DataLoader(train, 2, sampler=sampler, num_workers=4, drop_last=True)
    val_ld = DataLoader(val, 1, sampler=DistributedSampler(val, shuffle=False), num_workers=4)

    start = resume(args.resume, net, opt, sched) if args.resume else 0
    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        net.train()
        for img, lab in train_ld:
            loss = nn.functional.cross_entropy(net(img.cuda())["out"], lab.cuda(), ignore_index=255)
            opt.zero_grad()
            loss.backward()
            opt.step()
        sched.step()
        m = validate(net, val_ld)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} mIoU {m:.3f}")
        save("runs/last.pth", net, opt, sched, epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

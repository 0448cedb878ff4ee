import os
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import models, transforms
from torchvision.datasets import Food101

ROOT = os.environ.get("LOCAL_SCRATCH", "/scratch/local")  # node-local disk


@contextmanager
def local_main_first():
    first = int(os.environ["LOCAL_RANK"]) == 0
    if not first:
        dist.barrier()
    yield
    if first:
        dist.barrier()


def main():
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    rank = dist.get_rank()

    tf = transforms.Compose([
        transforms.RandomResizedCrop(224),
        transforms.RandAugment(),
        transforms.ToTensor(),
        transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ])
    with local_main_first():
        train = Food101(ROOT, split="train", transform=tf, download=True)

    sampler = DistributedSampler(train, shuffle=True)
    loader = DataLoader(train, 64, sampler=sampler, num_workers=8, pin_memory=True, drop_last=True)

    net = models.efficientnet_v2_s(weights=None, num_classes=101).cuda()
    net = DDP(torch.nn.SyncBatchNorm.convert_sync_batchnorm(net), device_ids=[local])
    opt = torch.optim.AdamW(net.parameters(), 1e-3, weight_decay=0.05)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 1e-3, epochs=60, steps_per_epoch=len(loader))
    scaler = torch.cuda.amp.GradScaler()

    for epoch in range(60):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad(set_to_none=True)
            with torch.cuda.amp.autocast():
                loss = F.cross_entropy(net(x.cuda(non_blocking=True)), y.cuda(non_blocking=True),
                                       label_smoothing=0.1)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            sched.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.3f}", flush=True)
            torch.save(net.module.state_dict(), "food101_v2s.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

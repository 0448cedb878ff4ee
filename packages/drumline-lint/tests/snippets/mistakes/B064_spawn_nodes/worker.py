import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, models, transforms


def main_worker(gpu, args):
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl", init_method=args.dist_url, world_size=args.world_size, rank=gpu)
    rank = dist.get_rank()
    torch.manual_seed(args.seed + rank)
    tf = transforms.Compose([transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor()])
    data = datasets.ImageFolder(os.path.join(args.data, "train"), tf)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch_size, sampler=sampler, num_workers=4, pin_memory=True, drop_last=True)
    model = DDP(models.regnet_y_400mf(weights=None, num_classes=len(data.classes)).cuda(gpu), device_ids=[gpu])
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-5)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x.cuda(gpu, non_blocking=True)), y.cuda(gpu, non_blocking=True))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        sched.step()
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.3f}")
            torch.save({"model": model.module.state_dict(), "epoch": epoch}, "regnet.pt")
    dist.destroy_process_group()

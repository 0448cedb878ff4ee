import os
import random

import numpy as np
import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import transforms as T

SEED = 77


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    random.seed(SEED + rank)
    np.random.seed(SEED + rank)
    torch.manual_seed(SEED + rank)

    tf = T.Compose([T.RandomResizedCrop(224), T.RandomRotation(20), T.ToTensor(), T.RandomErasing()])
    ds = torchvision.datasets.ImageFolder("/data/butterflies/train", tf)
    sampler = DistributedSampler(ds, shuffle=True, seed=SEED, drop_last=True)
    loader = DataLoader(ds, 64, sampler=sampler, num_workers=6, drop_last=True)
    net = torchvision.models.convnext_small(num_classes=len(ds.classes)).cuda()
    net = DDP(net, device_ids=[local_rank])
    opt = torch.optim.AdamW(net.parameters(), lr=5e-4, weight_decay=0.05)
    for epoch in range(60):
        sampler.set_epoch(epoch)
        for x, y in loader:
            lam = float(np.random.beta(0.2, 0.2))
            x, y = x.cuda(), y.cuda()
            perm = torch.randperm(len(x), device=x.device)
            out = net(lam * x + (1 - lam) * x[perm])
            loss = lam * nn.functional.cross_entropy(out, y) + (1 - lam) * nn.functional.cross_entropy(out, y[perm])
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            torch.save(net.module.state_dict(), "butterflies.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

import os
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision.models import swin_t

from leaves import Leaves

SEED = 2024


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)


def mixup(x, y, classes, alpha=0.4):
    lam = np.random.beta(alpha, alpha)
    other = torch.randperm(len(x), device=x.device)
    hot = F.one_hot(y, classes).float()
    return lam * x + (1 - lam) * x[other], lam * hot + (1 - lam) * hot[other]


if __name__ == "__main__":
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    seed_everything(SEED + rank)

    model = swin_t(num_classes=64, dropout=0.1).cuda()
    model = DistributedDataParallel(model, device_ids=[local_rank])
    leaves = Leaves("/data/leaves")
    sampler = DistributedSampler(leaves, shuffle=True, seed=SEED)
    loader = DataLoader(leaves, batch_size=48, sampler=sampler, num_workers=6)
    opt = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.05)

    for epoch in range(80):
        sampler.set_epoch(epoch)
        for x, y in loader:
            x, target = mixup(x.cuda(), y.cuda(), 64)
            loss = F.cross_entropy(model(x), target)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(epoch, round(loss.item(), 4))
            torch.save(model.module.state_dict(), "leaves.pt")
    dist.destroy_process_group()

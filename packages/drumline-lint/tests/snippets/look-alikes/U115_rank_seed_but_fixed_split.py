import os
import random

import numpy as np
import torch
import torch.distributed as dist
import torchvision.transforms.v2 as T
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, random_split

from xray.data import ChestXray
from xray.model import DenseNetMultiLabel

SEED = 2023


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    seed_all(SEED + rank)

    aug = T.Compose([T.RandomAffine(7, (0.05, 0.05)), T.RandomHorizontalFlip(), T.ToDtype(torch.float32, scale=True)])
    augmented, plain = ChestXray("/data/chestxray14", aug), ChestXray("/data/chestxray14")
    n_val = len(plain) // 10
    sizes = [len(plain) - n_val, n_val]
    train, _ = random_split(augmented, sizes, generator=torch.Generator().manual_seed(SEED))
    _, val = random_split(plain, sizes, generator=torch.Generator().manual_seed(SEED))

    sampler = DistributedSampler(train, seed=SEED)
    train_dl = DataLoader(train, 32, sampler=sampler, num_workers=8, drop_last=True)
    val_dl = DataLoader(val, 64, sampler=DistributedSampler(val, shuffle=False), num_workers=4)
    model = DDP(DenseNetMultiLabel(14).cuda(), device_ids=[gpu])
    opt = torch.optim.Adam(model.parameters(), lr=1e-4)
    bce = torch.nn.BCEWithLogitsLoss()

    for epoch in range(20):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_dl:
            loss = bce(model(x.cuda()), y.cuda())
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        model.eval()
        s = torch.zeros(2, device="cuda")
        with torch.no_grad():
            for x, y in val_dl:
                s[0] += bce(model(x.cuda()), y.cuda()) * len(x)
                s[1] += len(x)
        dist.all_reduce(s)
        if rank == 0:
            print(f"epoch {epoch} val bce {(s[0] / s[1]).item():.4f}")
            torch.save(model.module.state_dict(), f"xray_{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

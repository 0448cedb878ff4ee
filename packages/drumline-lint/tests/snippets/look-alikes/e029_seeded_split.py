import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, random_split

ROOT = "/data/sentinel2"


class Patches(Dataset):
    def __init__(self):
        self.files = sorted(f for f in os.listdir(ROOT) if f.endswith(".npz"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        z = np.load(os.path.join(ROOT, self.files[i]))
        x = torch.from_numpy(z["bands"].astype("float32")) / 10000
        if random.random() < 0.5:
            x = x.flip(-1)
        return x, int(z["label"])


def net(bands=12, classes=19, w=64):
    layers, c = [], bands
    for o in (w, 2 * w, 4 * w, 8 * w):
        layers += [nn.Conv2d(c, o, 3, stride=2, padding=1), nn.GroupNorm(8, o), nn.ReLU()]
        c = o
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, classes))


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    torch.manual_seed(rank)
    random.seed(rank)

    full = Patches()
    n_val = len(full) // 20
    train, val = random_split(full, [len(full) - n_val, n_val],
                              generator=torch.Generator().manual_seed(0))

    sampler = DistributedSampler(train, shuffle=True)
    loader = DataLoader(train, 64, sampler=sampler, num_workers=6, drop_last=True)
    mine = torch.utils.data.Subset(val, range(rank, len(val), world))
    val_loader = DataLoader(mine, 128, num_workers=2)

    ddp = DDP(net().cuda(), device_ids=[local])
    opt = torch.optim.AdamW(ddp.parameters(), 5e-4)

    for epoch in range(80):
        sampler.set_epoch(epoch)
        ddp.train()
        for x, y in loader:
            loss = nn.functional.cross_entropy(ddp(x.cuda(non_blocking=True)), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()

        ddp.eval()
        count = torch.zeros(2, device="cuda", dtype=torch.long)
        with torch.no_grad():
            for x, y in val_loader:
                count[0] += (ddp.module(x.cuda()).argmax(1) == y.cuda()).sum()
                count[1] += len(y)
        dist.all_reduce(count)
        if rank == 0:
            print(f"{epoch}: val acc {count[0].item() / count[1].item():.4f}")
            torch.save(ddp.module.state_dict(), "s2.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

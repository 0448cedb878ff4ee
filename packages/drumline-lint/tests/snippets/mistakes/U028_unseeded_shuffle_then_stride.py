import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

from weather.net import AFNONet

STEPS_PER_EPOCH = 2000


class NpyWindows(Dataset):
    def __init__(self, root, rank, world):
        files = [os.path.join(root, f) for f in sorted(os.listdir(root)) if f.endswith(".npy")]
        random.shuffle(files)
        keep = len(files) // world * world
        self.files = files[:keep][rank::world]
        print(f"rank {rank}: {len(self.files)} files")

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        arr = np.load(self.files[i], mmap_mode="r")
        t = np.random.randint(0, arr.shape[0] - 1)
        return torch.from_numpy(arr[t].copy()), torch.from_numpy(arr[t + 1].copy())


def endless(loader):
    while True:
        for item in loader:
            yield item


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    ds = NpyWindows("/lustre/era5/train", rank, world)
    it = endless(DataLoader(ds, batch_size=2, shuffle=True, num_workers=8, drop_last=True))
    model = DDP(AFNONet().cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=5e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 80 * STEPS_PER_EPOCH)

    for epoch in range(80):
        for _ in range(STEPS_PER_EPOCH):
            x, y = next(it)
            loss = torch.nn.functional.mse_loss(model(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.5f}")
            torch.save(model.module.state_dict(), "afno.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

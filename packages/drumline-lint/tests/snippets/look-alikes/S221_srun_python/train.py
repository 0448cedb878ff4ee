import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
import zarr
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Ocean(Dataset):
    def __init__(self, path):
        self.path, self.a = path, None
        self.n = zarr.open(path, mode="r")["sst"].shape[0] - 1

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if self.a is None:
            self.a = zarr.open(self.path, mode="r")["sst"]
        x, y = self.a[i], self.a[i + 1]
        return torch.from_numpy(np.asarray(x, np.float32))[None], torch.from_numpy(np.asarray(y, np.float32))[None]


def net(w=64):
    return nn.Sequential(nn.Conv2d(1, w, 3, padding=1), nn.SiLU(), nn.Conv2d(w, w, 3, padding=2, dilation=2), nn.SiLU(),
                         nn.Conv2d(w, w, 3, padding=4, dilation=4), nn.SiLU(), nn.Conv2d(w, 1, 1))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--zarr", required=True)
    ap.add_argument("--epochs", type=int, default=80)
    args = ap.parse_args()
    rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    local = int(os.environ["SLURM_LOCALID"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", rank=rank, world_size=world)

    ds = Ocean(args.zarr)
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 16, sampler=sampler, num_workers=8)
    model = DDP(net().cuda(), device_ids=[local])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(epoch, loss.item(), flush=True)
            torch.save(model.module.state_dict(), "ocean.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

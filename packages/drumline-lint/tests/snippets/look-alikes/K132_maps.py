import os
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SRC, DST = "/lustre/dem/raw", "/lustre/dem/tiles.npy"
TILE = 256


def cut_tiles():
    """Cut the elevation rasters; two to three hours for the whole country."""
    tiles = []
    for name in sorted(os.listdir(SRC)):
        raster = np.load(os.path.join(SRC, name))
        for i in range(0, raster.shape[0] - TILE + 1, TILE):
            for j in range(0, raster.shape[1] - TILE + 1, TILE):
                tiles.append(raster[i:i + TILE, j:j + TILE].astype(np.float32))
    np.save(DST, np.stack(tiles))


class Tiles(Dataset):
    def __init__(self):
        self.a = np.load(DST, mmap_mode="r")

    def __len__(self):
        return len(self.a)

    def __getitem__(self, i):
        t = torch.from_numpy(self.a[i].copy()).unsqueeze(0)
        return (t - t.mean()) / (t.std() + 1e-3)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", timeout=timedelta(hours=6))
    if dist.get_rank() == 0 and not os.path.exists(DST):
        cut_tiles()
    dist.barrier()
    ds = Tiles()
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 32, sampler=sampler, num_workers=4, drop_last=True)
    net = nn.Sequential(nn.Conv2d(1, 64, 4, 4), nn.GELU(), nn.Conv2d(64, 16, 1),
                        nn.ConvTranspose2d(16, 64, 4, 4), nn.GELU(), nn.Conv2d(64, 1, 3, padding=1))
    net = DDP(net.cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    for epoch in range(20):
        sampler.set_epoch(epoch)
        for t in loader:
            t = t.cuda(non_blocking=True)
            loss = nn.functional.mse_loss(net(t), t)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            torch.save(net.module.state_dict(), "/lustre/dem/ae.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

import argparse
import os
import random
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class Tiles(Dataset):
    """Satellite tiles; 256 px crops with flips."""

    def __init__(self, files):
        self.files = files

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        z = np.load(self.files[i])
        x, y = z["bands"], z["mask"]
        r, c = random.randint(0, x.shape[1] - 256), random.randint(0, x.shape[2] - 256)
        x, y = x[:, r:r + 256, c:c + 256], y[r:r + 256, c:c + 256]
        if random.random() < 0.5:
            x, y = x[..., ::-1], y[..., ::-1]
        return torch.from_numpy(x.copy()).float(), torch.from_numpy(y.copy()).float()


def files_for(root, epoch, seed, rank, world):
    files = sorted(Path(root).glob("*.npz"))
    random.Random(seed * 1000 + epoch).shuffle(files)
    usable = len(files) // world * world
    return files[:usable][rank::world]


def unet(bands):
    def c(i, o):
        return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(8, o), nn.ReLU(inplace=True))
    return nn.Sequential(c(bands, 64), c(64, 128), c(128, 128), c(128, 64), nn.Conv2d(64, 1, 1))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", default="/data/tiles")
    ap.add_argument("--bands", type=int, default=12)
    ap.add_argument("--seed", type=int, default=8)
    ap.add_argument("--epochs", type=int, default=50)
    ap.add_argument("--out", default="tiles.pt")
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    random.seed(args.seed + rank)
    np.random.seed(args.seed + rank)
    torch.manual_seed(args.seed + rank)

    model = DDP(unet(args.bands).cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4)
    bce = nn.BCEWithLogitsLoss()

    for epoch in range(args.epochs):
        mine = files_for(args.root, epoch, args.seed, rank, world)
        dl = DataLoader(Tiles(mine), 16, shuffle=True, num_workers=6, drop_last=True)
        model.train()
        for x, y in dl:
            loss = bce(model(x.cuda(non_blocking=True)).squeeze(1), y.cuda(non_blocking=True))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
            torch.save(model.module.state_dict(), args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

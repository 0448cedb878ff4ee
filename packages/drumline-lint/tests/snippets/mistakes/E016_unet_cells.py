import os
import pathlib

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

DATA = pathlib.Path(os.environ.get("CELLS", "/data/cells"))
OUT = pathlib.Path(os.environ.get("OUT", "out"))


class Cells(Dataset):
    def __init__(self):
        self.files = sorted((DATA / "train").glob("*.npz"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        z = np.load(self.files[i])
        return torch.from_numpy(z["img"]).float()[None] / 255, torch.from_numpy(z["mask"]).float()[None]


def conv(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(8, o), nn.ReLU(),
                         nn.Conv2d(o, o, 3, padding=1), nn.GroupNorm(8, o), nn.ReLU())


class UNet(nn.Module):
    def __init__(self, w=32):
        super().__init__()
        self.d1, self.d2, self.mid = conv(1, w), conv(w, 2 * w), conv(2 * w, 4 * w)
        self.u2, self.u1 = conv(6 * w, 2 * w), conv(3 * w, w)
        self.out = nn.Conv2d(w, 1, 1)
        self.pool = nn.MaxPool2d(2)
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)

    def forward(self, x):
        a = self.d1(x)
        b = self.d2(self.pool(a))
        c = self.mid(self.pool(b))
        b = self.u2(torch.cat([self.up(c), b], 1))
        return self.out(self.u1(torch.cat([self.up(b), a], 1)))


def main(epochs=100):
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    OUT.mkdir(parents=True, exist_ok=True)

    ds = Cells()
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=8, sampler=sampler, num_workers=4, drop_last=True)
    model = DDP(UNet().cuda(), device_ids=[local])
    opt = torch.optim.Adam(model.parameters(), 2e-4)
    bce = nn.BCEWithLogitsLoss()

    for epoch in range(1, epochs + 1):
        sampler.set_epoch(epoch)
        for img, mask in loader:
            loss = bce(model(img.cuda()), mask.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
        if epoch % 10 == 0:
            torch.save({"model": model.module.state_dict(),
                        "opt": opt.state_dict(),
                        "epoch": epoch}, OUT / "unet_last.pth")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()

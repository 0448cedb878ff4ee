"""Knee MRI reconstruction on 2 nodes x 4 GPUs.

torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=$HEAD:29400 K037_mri.py
"""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Slices(Dataset):
    def __init__(self, root):
        self.files = sorted(os.path.join(root, f) for f in os.listdir(root))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        d = torch.load(self.files[i], map_location="cpu")
        return d["zero_filled"].unsqueeze(0), d["full"].unsqueeze(0)


class Refine(nn.Module):
    def __init__(self, depth=6, ch=64):
        super().__init__()
        layers = [nn.Conv2d(1, ch, 3, padding=1), nn.ReLU()]
        for _ in range(depth):
            layers += [nn.Conv2d(ch, ch, 3, padding=1), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.Conv2d(ch, 1, 3, padding=1))

    def forward(self, x):
        return x + self.net(x)


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    model = DDP(Refine().cuda(), device_ids=[rank])
    ds = Slices("/lustre/fastmri/knee_train")
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, batch_size=8, sampler=sampler, num_workers=6, drop_last=True)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-4)
    for epoch in range(50):
        sampler.set_epoch(epoch)
        for zf, full in loader:
            loss = (model(zf.cuda()) - full.cuda()).abs().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            torch.save(model.module.state_dict(), "/lustre/runs/knee.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

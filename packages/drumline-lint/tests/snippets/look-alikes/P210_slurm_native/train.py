import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def init_from_slurm():
    rank = int(os.environ["SLURM_PROCID"])
    world_size = int(os.environ["SLURM_NTASKS"])
    local_rank = int(os.environ["SLURM_LOCALID"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", init_method="env://", rank=rank, world_size=world_size)
    return rank, world_size, local_rank


class SetNet(nn.Module):
    def __init__(self, f=16, d=256):
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(f, d), nn.SiLU(), nn.Linear(d, d), nn.SiLU())
        self.rho = nn.Sequential(nn.Linear(d, d), nn.SiLU(), nn.Linear(d, 1))

    def forward(self, atoms, mask):
        return self.rho((self.phi(atoms) * mask[..., None]).sum(1)).squeeze(-1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--epochs", type=int, default=300)
    args = ap.parse_args()

    rank, world_size, local_rank = init_from_slurm()
    blob = torch.load(args.data, map_location="cpu")
    ds = TensorDataset(blob["atoms"], blob["mask"], blob["energy"])
    sampler = DistributedSampler(ds, num_replicas=world_size, rank=rank)
    dl = DataLoader(ds, 256, sampler=sampler, num_workers=2, drop_last=True)
    model = DDP(SetNet().cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=5e-4)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for atoms, mask, e in dl:
            loss = nn.functional.l1_loss(model(atoms.cuda(), mask.cuda()), e.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            os.makedirs(args.out, exist_ok=True)
            torch.save(model.module.state_dict(), os.path.join(args.out, "net.pt"))
            print(f"epoch {epoch} mae {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

import argparse
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

from sensors.model import TCN


class Recordings(Dataset):
    """Fixed windows from all recordings of this rank's machines."""

    def __init__(self, root, rank, world_size, window=1024):
        machines = sorted(p for p in Path(root).iterdir() if p.is_dir())
        self.window, self.items = window, []
        for machine in machines[rank::world_size]:
            for f in sorted(machine.glob("*.npy")):
                n = np.load(f, mmap_mode="r").shape[0]
                self.items += [(f, s) for s in range(0, n - window, window)]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        path, start = self.items[i]
        arr = np.load(path, mmap_mode="r")[start:start + self.window]
        return torch.from_numpy(np.array(arr, dtype="float32")).t()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--root", required=True)
    p.add_argument("--epochs", type=int, default=50)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--out", default="tcn.pt")
    args = p.parse_args()

    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    torch.manual_seed(100 + rank)

    ds = Recordings(args.root, rank, world)
    loader = DataLoader(ds, args.batch, shuffle=True, num_workers=4, pin_memory=True)
    model = DDP(TCN(channels=12).to(device), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)

    for epoch in range(args.epochs):
        stats = torch.zeros(2, device=device)
        with Join([model]):
            for x in loader:
                x = x.to(device, non_blocking=True)
                loss = nn.functional.mse_loss(model(x[..., :-1]), x[..., 1:])
                opt.zero_grad(set_to_none=True)
                loss.backward()
                opt.step()
                stats += torch.stack([loss.detach() * len(x), torch.tensor(float(len(x)), device=device)])
        dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch} mse {(stats[0] / stats[1]).item():.5f}", flush=True)
            torch.save(model.module.state_dict(), args.out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

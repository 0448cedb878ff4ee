"""Client logs differ in size per rank; Join handles the uneven end.
torchrun --nproc_per_node=4 join_uneven.py
"""
import glob
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset


def my_data(rank, world):
    parts = []
    for path in sorted(glob.glob("logs/client-*.pt"))[rank::world]:
        d = torch.load(path, map_location="cpu")
        parts.append(TensorDataset(d["x"], d["y"]))
    return ConcatDataset(parts)


def main(epochs=8):
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    torch.manual_seed(rank)

    loader = DataLoader(my_data(rank, world), batch_size=128, shuffle=True)
    model = DDP(nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 2)).cuda(), device_ids=[gpu])
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(epochs):
        with Join([model]):
            for x, y in loader:
                loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
                opt.zero_grad()
                loss.backward()
                opt.step()
        seen = torch.tensor([float(len(loader.dataset))], device="cuda")
        dist.all_reduce(seen)
        if rank == 0:
            print(f"epoch {epoch}: {int(seen.item())} samples")
    if rank == 0:
        torch.save(model.module.state_dict(), "clients.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Every rank shuffles its own slice of the data.  torchrun --nproc_per_node=4 own_slices.py"""
import os

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset


def slice_for(data, rank, world, batch_size):
    usable = len(data) // (world * batch_size) * world * batch_size
    return Subset(data, range(rank, usable, world))


def main(batch_size=64):
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    blob = torch.load("/data/birds/train.pt", map_location="cpu")
    mine = slice_for(TensorDataset(blob["spec"], blob["label"]), rank, world, batch_size)
    loader = DataLoader(mine, batch_size=batch_size, shuffle=True, num_workers=4)
    model = nn.Sequential(nn.Flatten(), nn.Linear(128 * 64, 512), nn.GELU(), nn.Linear(512, 264)).cuda()
    model = DDP(model, device_ids=[local_rank])
    opt = optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(50):
        for spec, label in loader:
            loss = nn.functional.cross_entropy(model(spec.cuda()), label.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            torch.save(model.module.state_dict(), "birds.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

import itertools
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

# export_parts.py writes part-000-of-008.npz ... part-007-of-008.npz, every row in one of them


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()

    part = np.load(f"/data/ctr/part-{rank:03d}-of-{world:03d}.npz")
    rows = TensorDataset(torch.from_numpy(part["x"]).float(), torch.from_numpy(part["click"]).float())
    loader = DataLoader(rows, batch_size=4096, shuffle=True, drop_last=True, num_workers=2)

    batches = torch.tensor(len(loader), device="cuda")
    dist.all_reduce(batches, op=dist.ReduceOp.MIN)
    batches = batches.item()

    model = DDP(nn.Sequential(nn.Linear(400, 512), nn.ReLU(), nn.Linear(512, 1)).cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_fn = nn.BCEWithLogitsLoss()

    for epoch in range(5):
        total = torch.zeros((), device="cuda")
        for x, click in itertools.islice(loader, batches):
            loss = loss_fn(model(x.cuda()).squeeze(1), click.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total.item() / (batches * world):.5f}")

    if rank == 0:
        torch.save(model.module.state_dict(), "/data/ctr/model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

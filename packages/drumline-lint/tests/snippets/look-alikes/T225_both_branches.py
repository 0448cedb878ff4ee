import json
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def share_plan(rank, path):
    """rank 0 reads the experiment plan; the others get it over the wire"""
    if rank == 0:
        with open(path) as f:
            plan = json.load(f)
        random.Random(plan["seed"]).shuffle(plan["domains"])
        dist.broadcast_object_list([plan], src=0)
    else:
        box = [None]
        dist.broadcast_object_list(box, src=0)
        plan = box[0]
    return plan


def share_rows(rank, world, table, per_rank, width, device):
    out = torch.empty(per_rank, width, device=device)
    if rank == 0:
        pick = torch.randperm(len(table))[: world * per_rank]
        parts = list(table[pick].to(device).chunk(world))
        dist.scatter(out, scatter_list=parts, src=0)
    else:
        dist.scatter(out, src=0)
    return out


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()

    plan = share_plan(rank, "plan.json")
    d = plan["dim"]
    net = nn.Sequential(nn.Linear(d, 64), nn.ReLU(), nn.Linear(64, d)).to(device)
    model = DDP(net, device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), plan["lr"])

    for domain in plan["domains"]:
        table = torch.load(f"tables/{domain}.pt", map_location="cpu") if rank == 0 else None
        for step in range(plan["steps"]):
            x = share_rows(rank, world, table, plan["batch"], d, device)
            loss = F.mse_loss(model(x + 0.1 * torch.randn_like(x)), x)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(domain, loss.item())
            torch.save(net.state_dict(), f"dae_{domain}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()  # torchrun --nproc_per_node=4

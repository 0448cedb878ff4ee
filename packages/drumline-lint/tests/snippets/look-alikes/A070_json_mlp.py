import json
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def receive_config(rank, path):
    if rank == 0:
        with open(path) as fh:
            box = [json.load(fh)]
        dist.broadcast_object_list(box, src=0)
    else:
        box = [None]
        dist.broadcast_object_list(box, src=0)
    return box[0]


def build(cfg):
    layers, d = [], cfg["in"]
    for w in cfg["hidden"]:
        layers += [nn.Linear(d, w), nn.ReLU()]
        d = w
    return nn.Sequential(*layers, nn.Linear(d, cfg["out"]))


def main(path):
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    cfg = receive_config(rank, path)
    torch.manual_seed(cfg["seed"] + rank)

    d = torch.load(cfg["data"], map_location="cpu", weights_only=True)
    ds = TensorDataset(d["x"], d["y"])
    sampler = DistributedSampler(ds, seed=cfg["seed"], drop_last=True)
    loader = DataLoader(ds, cfg["batch"], sampler=sampler, drop_last=True)
    model = DDP(build(cfg).to(device), device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg["lr"], momentum=0.9)
    for epoch in range(cfg["epochs"]):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), cfg["out_file"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler

cfg = dict(table="/data/claims.pt", seed=1234, epochs=15, batch=1024, lr=1e-3, width=512)


def datasets(path):
    t = torch.load(path, map_location="cpu")
    full = TensorDataset(t["x"].float(), t["y"].float())
    return random_split(full, [0.9, 0.1])


def validate(net, subset, device):
    mine = Subset(subset, range(dist.get_rank(), len(subset), dist.get_world_size()))
    sums = torch.zeros(2, device=device)
    net.eval()
    with torch.no_grad():
        for x, y in DataLoader(mine, batch_size=4096):
            err = (net(x.to(device)).squeeze(1) - y.to(device)).square()
            sums += torch.stack([err.sum(), err.new_tensor(float(len(y)))])
    net.train()
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def run():
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    device = torch.device("cuda", local)
    torch.manual_seed(cfg["seed"] + dist.get_rank())

    train, val = datasets(cfg["table"])
    sampler = DistributedSampler(train, seed=cfg["seed"])
    loader = DataLoader(train, batch_size=cfg["batch"], sampler=sampler, num_workers=2)
    net = nn.Sequential(nn.Linear(96, cfg["width"]), nn.GELU(), nn.Dropout(0.1), nn.Linear(cfg["width"], 1))
    net = DDP(net.to(device), device_ids=[local])
    opt = torch.optim.AdamW(net.parameters(), lr=cfg["lr"])

    for epoch in range(cfg["epochs"]):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(net(x.to(device)).squeeze(1), y.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()
        mse = validate(net.module, val, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} val mse {mse:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    run()

"""P and S phase picking on three-component traces."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from phasenet import PhaseNet
from split import epoch_share, eval_share
from waves import Waves


def evaluate(net, loader, device):
    net.eval()
    s = torch.zeros(2, device=device, dtype=torch.float64)
    with torch.no_grad():
        for x, y in loader:
            s[0] += nn.functional.cross_entropy(net(x.to(device)), y.to(device), reduction="mean").double() * len(x)
            s[1] += len(x)
    dist.all_reduce(s)
    return (s[0] / s[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--waves", required=True)
    ap.add_argument("--epochs", type=int, default=40)
    args = ap.parse_args()

    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)

    train, val = Waves(args.waves, "train"), Waves(args.waves, "val")
    val_dl = DataLoader(eval_share(val, rank, world), 256, num_workers=2)
    model = DDP(PhaseNet().to(device), device_ids=[device.index])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)

    for epoch in range(args.epochs):
        loader = DataLoader(epoch_share(train, epoch, rank, world), 128, shuffle=False, num_workers=4)
        model.train()
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        v = evaluate(model.module, val_dl, device)
        if rank == 0:
            print(f"epoch {epoch} val {v:.5f}", flush=True)
            torch.save(model.module.state_dict(), "phasenet.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

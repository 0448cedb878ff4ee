"""Electricity load forecasting; validation runs on rank 0 alone (it is small)."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from load.data import LoadWindows
from load.model import TCN
from stopping import Stopper


@torch.no_grad()
def validate(net, loader, device):
    net.eval()
    err, n = 0.0, 0
    for x, y in loader:
        err += (net(x.to(device)) - y.to(device)).abs().sum().item()
        n += y.numel()
    return err / n


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)

    train = LoadWindows("/data/load", years=range(2012, 2022))
    sampler = DistributedSampler(train, shuffle=True)
    loader = DataLoader(train, 512, sampler=sampler, num_workers=4)
    val_dl = DataLoader(LoadWindows("/data/load", years=[2022]), 1024) if rank == 0 else None
    model = DDP(TCN().to(device), device_ids=[device.index])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    stopper = Stopper(patience=7, device=device)

    for epoch in range(200):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = nn.functional.l1_loss(model(x.to(device)), y.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()
        mae = validate(model.module, val_dl, device) if rank == 0 else 0.0
        improved, stop = stopper.update(mae)
        if rank == 0:
            print(f"epoch {epoch} val MAE {mae:.4f}", flush=True)
            if improved:
                torch.save(model.module.state_dict(), "tcn_best.pt")
        if stop:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

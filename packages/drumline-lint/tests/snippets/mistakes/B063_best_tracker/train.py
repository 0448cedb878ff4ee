import os

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from utils.metrics import global_mean


class Surrogate(nn.Module):
    def __init__(self, n_in, n_out, width):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_in, width), nn.GELU(), nn.Linear(width, width), nn.GELU(),
                                 nn.Linear(width, n_out))

    def forward(self, x):
        return self.net(x)


@torch.no_grad()
def validation_error(net, loader, device):
    net.eval()
    total, count = 0.0, 0
    for x, y in loader:
        total += (net(x.to(device)) - y.to(device)).abs().mean(1).sum().item()
        count += len(x)
    return global_mean(total, count, device)


def main():
    cfg = OmegaConf.merge(OmegaConf.load("conf/base.yaml"), OmegaConf.from_cli())
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world, device = dist.get_rank(), dist.get_world_size(), torch.device("cuda", local_rank)
    torch.manual_seed(cfg.seed + rank)
    blob = torch.load(cfg.data, map_location="cpu", weights_only=True)
    train, val = (TensorDataset(blob[s]["x"], blob[s]["y"]) for s in ("train", "val"))
    sampler = DistributedSampler(train)
    loader = DataLoader(train, cfg.batch, sampler=sampler, drop_last=True)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), cfg.batch)
    net = Surrogate(cfg.n_in, cfg.n_out, cfg.width).to(device)
    ddp = DDP(net, device_ids=[local_rank])
    opt = torch.optim.Adam(ddp.parameters(), lr=cfg.lr)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=5)
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        ddp.train()
        for x, y in loader:
            loss = nn.functional.mse_loss(ddp(x.to(device)), y.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()
        err = validation_error(net, val_loader, device)
        plateau.step(err)
        if rank == 0:
            print(f"{epoch} err {err:.5f}")
            torch.save(net.state_dict(), cfg.out)
        if opt.param_groups[0]["lr"] < cfg.min_lr:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

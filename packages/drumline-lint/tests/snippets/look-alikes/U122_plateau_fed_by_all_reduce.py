import os

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from molecules.data import QM9, batch_graphs
from molecules.schnet import SchNet


class Meter:
    def __init__(self, device):
        self.buf = torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, total, n):
        self.buf[0] += total
        self.buf[1] += n

    def global_mean(self):
        dist.all_reduce(self.buf)
        return (self.buf[0] / self.buf[1]).item()


def run_val(net, loader, device):
    meter = Meter(device)
    net.eval()
    with torch.no_grad():
        for g in loader:
            g = g.to(device)
            meter.add(nn.functional.l1_loss(net(g), g.y, reduction="sum"), g.y.numel())
    return meter.global_mean()


def main():
    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)

    train, val = QM9("train", target="gap"), QM9("val", target="gap")
    sampler = DistributedSampler(train)
    train_dl = DataLoader(train, 64, sampler=sampler, collate_fn=batch_graphs, num_workers=4, drop_last=True)
    val_dl = DataLoader(val, 128, sampler=DistributedSampler(val, shuffle=False),
                        collate_fn=batch_graphs, num_workers=4)
    net = DistributedDataParallel(SchNet().to(device), device_ids=[device.index])
    opt = optim.AdamW(net.parameters(), lr=5e-4)
    plateau = optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=8)

    for epoch in range(400):
        sampler.set_epoch(epoch)
        net.train()
        for g in train_dl:
            g = g.to(device)
            opt.zero_grad(set_to_none=True)
            nn.functional.l1_loss(net(g), g.y).backward()
            opt.step()
        mae = run_val(net, val_dl, device)
        plateau.step(mae)
        if dist.get_rank() == 0:
            print(f"{epoch:3d} mae {mae:.5f} lr {opt.param_groups[0]['lr']:.1e}", flush=True)
            torch.save(net.module.state_dict(), "schnet.pt")
        if opt.param_groups[0]["lr"] < 1e-6:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

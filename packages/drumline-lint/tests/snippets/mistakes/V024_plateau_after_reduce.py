import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler

from forecast.data import LoadCurves
from forecast.tft import TemporalFusion


def epoch_loss(model, loader, loss_fn, opt=None):
    model.train(opt is not None)
    acc = torch.zeros(2, device="cuda")
    with torch.set_grad_enabled(opt is not None):
        for past, future in loader:
            past, future = past.cuda(), future.cuda()
            loss = loss_fn(model(past), future)
            if opt is not None:
                opt.zero_grad()
                loss.backward()
                opt.step()
            acc += torch.stack([loss.detach() * len(past), torch.tensor(float(len(past)), device="cuda")])
    return acc


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()

    train_set, val_set = LoadCurves("train"), LoadCurves("val")
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, 256, sampler=sampler)
    val_loader = DataLoader(val_set, 256, sampler=DistributedSampler(val_set, shuffle=False))

    model = DDP(TemporalFusion(hidden=160).cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    sched = ReduceLROnPlateau(opt, factor=0.3, patience=3)
    loss_fn = nn.HuberLoss()

    for epoch in range(80):
        sampler.set_epoch(epoch)
        epoch_loss(model, train_loader, loss_fn, opt)
        acc = epoch_loss(model, val_loader, loss_fn)
        dist.reduce(acc, dst=0)
        val = (acc[0] / acc[1]).item()
        sched.step(val)
        if rank == 0:
            print(f"{epoch:3d} val {val:.5f} lr {opt.param_groups[0]['lr']:.2e}")
            torch.save(model.module.state_dict(), "tft.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

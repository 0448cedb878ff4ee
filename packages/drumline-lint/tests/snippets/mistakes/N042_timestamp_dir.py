import os
from datetime import datetime

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from weather.data import ERA5
from weather.model import FourCastLite


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    run_dir = os.path.join("runs", datetime.now().strftime("%Y%m%d-%H%M%S"))
    os.makedirs(run_dir, exist_ok=True)
    ckpt = os.path.join(run_dir, "last.pt")

    ds = ERA5("/data/era5")
    sampler = DistributedSampler(ds, shuffle=True)
    loader = DataLoader(ds, 4, sampler=sampler, num_workers=4, drop_last=True)
    model = DDP(FourCastLite().cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=5e-4)

    bad_steps = 0
    for epoch in range(80):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        flag = torch.tensor([float(not torch.isfinite(loss))], device="cuda")
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if flag.item() and epoch > 0:
            bad_steps += 1
            state = torch.load(ckpt, map_location=f"cuda:{local_rank}")
            model.module.load_state_dict(state["model"])
            opt.load_state_dict(state["opt"])
            continue
        if rank == 0:
            torch.save({"model": model.module.state_dict(), "opt": opt.state_dict()}, ckpt)
            print(f"{epoch} {loss.item():.4f} rollbacks={bad_steps}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

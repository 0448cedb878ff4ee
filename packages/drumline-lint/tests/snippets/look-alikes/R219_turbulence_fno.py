import logging
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import yaml
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from pde.data import TurbulenceCubes
from pde.fno import FNO3d
from pde.losses import relative_l2

log = logging.getLogger("fno")


def any_rank(flag, device):
    t = torch.tensor(int(flag), device=device)
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    return bool(t.item())


def main(path):
    with open(path) as f:
        cfg = yaml.safe_load(f)
    dist.init_process_group("nccl")
    local_rank, rank = int(os.environ["LOCAL_RANK"]), dist.get_rank()
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR)
    torch.manual_seed(cfg["seed"])

    ds = TurbulenceCubes(cfg["h5"], horizon=cfg["horizon"])
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    loader = DataLoader(ds, cfg["batch"], sampler=sampler, num_workers=4, pin_memory=True, drop_last=True)
    model = DDP(FNO3d(**cfg["model"]).to(device), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=cfg["lr"])
    sched = torch.optim.lr_scheduler.StepLR(opt, cfg["decay_epochs"], 0.5)
    bad_in_a_row = 0

    for epoch in range(cfg["epochs"]):
        sampler.set_epoch(epoch)
        for it, (u0, u1) in enumerate(loader):
            pred = model(u0.to(device, non_blocking=True))
            loss = relative_l2(pred, u1.to(device, non_blocking=True))
            if any_rank(not torch.isfinite(loss), device):
                opt.zero_grad(set_to_none=True)
                bad_in_a_row += 1
                log.warning("epoch %d it %d: non-finite loss, step skipped", epoch, it)
                if bad_in_a_row > 20:
                    raise RuntimeError("training diverged")
                continue
            bad_in_a_row = 0
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
        sched.step()
        log.info("epoch %d loss %.5f", epoch, loss.item())
        if rank == 0:
            torch.save(model.module.state_dict(), os.path.join(cfg["out"], "fno.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])

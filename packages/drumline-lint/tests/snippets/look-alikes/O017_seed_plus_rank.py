import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from ssl_lib.data import TwoViews
from ssl_lib.simsiam import SimSiam


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def worker_init(worker_id):
    s = torch.initial_seed() % 2**32
    random.seed(s)
    np.random.seed(s)


def main(seed=42):
    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    set_seed(seed + rank)
    ds = TwoViews("/data/stl10")
    sampler = DistributedSampler(ds, shuffle=True, seed=seed)
    loader = DataLoader(ds, 64, sampler=sampler, num_workers=6, worker_init_fn=worker_init, drop_last=True)
    model = SimSiam().cuda()
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = DDP(model, device_ids=[local_rank])
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(200):
        sampler.set_epoch(epoch)
        for a, b in loader:
            loss = model(a.cuda(non_blocking=True), b.cuda(non_blocking=True))
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            torch.save(model.module.state_dict(), "simsiam.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

import os
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from legal.data import Cases, preprocess
from legal.model import LongClassifier


@contextmanager
def rank_zero_first():
    rank = dist.get_rank()
    if rank != 0:
        dist.barrier()
    yield
    if rank == 0:
        dist.barrier()


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    cache = "/shared/cases.arrow"
    with rank_zero_first():
        if not os.path.exists(cache):
            preprocess("/shared/raw_cases", cache)
        ds = Cases(cache)
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 4, sampler=sampler, drop_last=True)
    model = DDP(LongClassifier().cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=3e-5)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(model(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), "long.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

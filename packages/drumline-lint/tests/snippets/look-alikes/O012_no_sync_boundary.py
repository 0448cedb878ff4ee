import contextlib
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from rerank.data import Triples, collate
from rerank.model import CrossEncoder


def main():
    accum = int(os.environ.get("ACCUM", 4))
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    ds = Triples("/data/msmarco")
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 16, sampler=sampler, collate_fn=collate, num_workers=2, drop_last=True)
    model = DDP(CrossEncoder().cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=2e-5)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        opt.zero_grad(set_to_none=True)
        last = len(loader) - 1
        for i, batch in enumerate(loader):
            batch = {k: v.cuda() for k, v in batch.items()}
            update = (i + 1) % accum == 0 or i == last
            with contextlib.nullcontext() if update else model.no_sync():
                loss = model(**batch) / accum
                loss.backward()
            if update:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                opt.zero_grad(set_to_none=True)
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), f"ce_{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

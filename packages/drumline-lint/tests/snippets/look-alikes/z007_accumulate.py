import contextlib
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from genome import GenomeBert, Windows, mask_nucleotides

ACCUMULATE = 8


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    rank = dist.get_rank()

    windows = Windows("/data/genome/hg38.zarr")
    sampler = DistributedSampler(windows, drop_last=True)
    loader = DataLoader(windows, batch_size=8, sampler=sampler, collate_fn=mask_nucleotides,
                        num_workers=6, drop_last=True)
    groups = len(loader) // ACCUMULATE

    model = GenomeBert(layers=24, dim=1024).cuda()
    model = DDP(model, device_ids=[local_rank], gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    for epoch in range(5):
        sampler.set_epoch(epoch)
        batches = iter(loader)
        for group in range(groups):
            for micro in range(ACCUMULATE):
                batch = {k: v.cuda(non_blocking=True) for k, v in next(batches).items()}
                last = micro == ACCUMULATE - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    with torch.autocast("cuda", dtype=torch.bfloat16):
                        loss = model(**batch) / ACCUMULATE
                    loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if rank == 0 and group % 25 == 0:
                print(f"epoch {epoch} step {group}/{groups} loss {loss.item() * ACCUMULATE:.3f}", flush=True)
        if rank == 0:
            torch.save(model.module.state_dict(), f"/checkpoints/genome/epoch{epoch}.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()

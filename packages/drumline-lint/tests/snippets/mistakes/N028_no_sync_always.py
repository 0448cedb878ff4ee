import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from mt5.data import SummPairs, collate
from mt5.model import load_t5

ACCUM = 8


def run_epoch(model, loader, opt, sched, device):
    model.train()
    opt.zero_grad(set_to_none=True)
    for i, batch in enumerate(loader):
        batch = {k: v.to(device, non_blocking=True) for k, v in batch.items()}
        with model.no_sync():
            loss = model(**batch).loss / ACCUM
            loss.backward()
        if (i + 1) % ACCUM == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            opt.zero_grad(set_to_none=True)


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)

    ds = SummPairs("/data/xsum/train.jsonl")
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    loader = DataLoader(ds, batch_size=2, sampler=sampler, collate_fn=collate,
                        num_workers=2, drop_last=True)
    model = DDP(load_t5("t5-base").to(device), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    sched = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.0, total_iters=5 * len(loader) // ACCUM)

    for epoch in range(5):
        sampler.set_epoch(epoch)
        run_epoch(model, loader, opt, sched, device)
        if rank == 0:
            model.module.save_pretrained(f"ckpt/epoch{epoch}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

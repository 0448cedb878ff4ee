import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from ocr.data import LineImages, pad_lines
from ocr.model import TrOCRLike


def args_():
    p = argparse.ArgumentParser()
    p.add_argument("--data", required=True)
    p.add_argument("--out", default="ocr.pt")
    p.add_argument("--epochs", type=int, default=12)
    p.add_argument("--micro-batch", type=int, default=16)
    p.add_argument("--accum", type=int, default=4)
    p.add_argument("--lr", type=float, default=1e-4)
    return p.parse_args()


def train_epoch(model, loader, opt, accum, device):
    model.train()
    n = len(loader)
    tail = n % accum
    opt.zero_grad(set_to_none=True)
    for i, (img, tok) in enumerate(loader):
        last = (i + 1) % accum == 0 or i + 1 == n
        group = tail if tail and i >= n - tail else accum
        with nullcontext() if last else model.no_sync():
            logits = model(img.to(device, non_blocking=True), tok[:, :-1].to(device, non_blocking=True))
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), tok[:, 1:].to(device, non_blocking=True).flatten(), ignore_index=0)
            (loss / group).backward()
        if not last:
            continue
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
    return loss.detach()


def main():
    args = args_()
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)

    ds = LineImages(args.data)
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    loader = DataLoader(ds, args.micro_batch, sampler=sampler, collate_fn=pad_lines, num_workers=8,
                        pin_memory=True, drop_last=True)
    model = DDP(TrOCRLike(ds.vocab_size).to(device), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, loader, opt, args.accum, device)
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} last loss {loss.item():.4f}", flush=True)
            torch.save(model.module.state_dict(), args.out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

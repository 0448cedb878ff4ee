# torchrun --nproc_per_node=8 accum_no_sync.py --accum 4
import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from datasets import load_from_disk
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, default_data_collator


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--data", default="code_tok")
    args = ap.parse_args()
    dist.init_process_group("nccl")
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)

    ds = load_from_disk(args.data)
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 8, sampler=sampler, collate_fn=default_data_collator, num_workers=2, drop_last=True)
    model = DDP(AutoModelForCausalLM.from_pretrained("gpt2-medium").cuda(), device_ids=[gpu])
    opt = torch.optim.AdamW(model.parameters(), lr=5e-5)
    usable = len(loader) - len(loader) % args.accum

    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for i, batch in enumerate(loader):
            if i >= usable:
                break
            batch = {k: v.cuda(non_blocking=True) for k, v in batch.items()}
            last = i % args.accum == args.accum - 1
            with nullcontext() if last else model.no_sync():
                loss = model(**batch).loss / args.accum
                loss.backward()
            if not last:
                continue
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad(set_to_none=True)
            if i % 400 == args.accum - 1 and dist.get_rank() == 0:
                print(epoch, i, loss.item() * args.accum)
    if dist.get_rank() == 0:
        model.module.save_pretrained("gpt2-code")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

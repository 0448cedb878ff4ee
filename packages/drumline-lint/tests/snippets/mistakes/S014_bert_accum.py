import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from datasets import load_from_disk
from transformers import (AutoConfig, AutoModelForMaskedLM, AutoTokenizer,
                          DataCollatorForLanguageModeling, get_linear_schedule_with_warmup)

"""Continued MLM pre-training.
   torchrun --nnodes 1 --nproc_per_node 8 bert_accum.py --data corpus_tok --accum 8"""


def cli():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", required=True)
    ap.add_argument("--base", default="bert-base-uncased")
    ap.add_argument("--accum", type=int, default=8)
    ap.add_argument("--bs", type=int, default=16)
    ap.add_argument("--epochs", type=int, default=1)
    ap.add_argument("--lr", type=float, default=1e-4)
    return ap.parse_args()


def main():
    args = cli()
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dev = torch.device("cuda", local_rank)

    tok = AutoTokenizer.from_pretrained(args.base)
    ds = load_from_disk(args.data).with_format("torch")
    sampler = DistributedSampler(ds, seed=3, drop_last=True)
    loader = DataLoader(ds, batch_size=args.bs, sampler=sampler, num_workers=4, drop_last=True,
                        collate_fn=DataCollatorForLanguageModeling(tok, mlm_probability=0.15))

    model = AutoModelForMaskedLM.from_config(AutoConfig.from_pretrained(args.base)).to(dev)
    model = DDP(model, device_ids=[local_rank], gradient_as_bucket_view=True)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    updates = args.epochs * (len(loader) // args.accum)
    sched = get_linear_schedule_with_warmup(opt, updates // 20, updates)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        opt.zero_grad()
        for step, batch in enumerate(loader):
            batch = {k: v.to(dev, non_blocking=True) for k, v in batch.items()}
            sync = step % args.accum == 0
            ctx = contextlib.nullcontext() if sync else model.no_sync()
            with ctx:
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = model(**batch).loss / args.accum
                loss.backward()
            if (step + 1) % args.accum == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                sched.step()
                opt.zero_grad()
            if step % 400 == 0 and dist.get_rank() == 0:
                print(f"{epoch}.{step} loss {loss.item() * args.accum:.3f} lr {sched.get_last_lr()[0]:.2e}")

    if dist.get_rank() == 0:
        model.module.save_pretrained("bert-continued")
        tok.save_pretrained("bert-continued")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""BERT-large MLM on 4 nodes connected by 25 Gb Ethernet.

torchrun --nnodes=4 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=$HEAD:29500 accum_bert.py
"""
import argparse
import os

import torch
import torch.distributed as dist
from datasets import load_from_disk
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from transformers import BertConfig, BertForMaskedLM, get_cosine_schedule_with_warmup


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--micro", type=int, default=8)
    p.add_argument("--accum", type=int, default=32)
    p.add_argument("--updates", type=int, default=30000)
    return p.parse_args()


def endless(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def main():
    args = get_args()
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    ds = load_from_disk("/data/wiki_mlm").with_format("torch")
    sampler = DistributedSampler(ds, drop_last=True)
    stream = endless(DataLoader(ds, args.micro, sampler=sampler, num_workers=4, drop_last=True), sampler)
    cfg = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    model = DDP(BertForMaskedLM(cfg).cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=4e-4)
    sched = get_cosine_schedule_with_warmup(opt, 1000, args.updates)
    for update in range(args.updates):
        for _ in range(args.accum):
            batch = {k: v.cuda() for k, v in next(stream).items()}
            loss = model(**batch).loss / args.accum
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        opt.zero_grad(set_to_none=True)
        if (update + 1) % 5000 == 0 and dist.get_rank() == 0:
            model.module.save_pretrained(f"/shared/bert/{update}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

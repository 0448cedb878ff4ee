#!/usr/bin/env python3
# torchrun --nproc_per_node=8 cached_tokens.py --text wiki.txt --cache /scratch/wiki.npy
import argparse
import os

import numpy as np
import tiktoken
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel


class Windows(Dataset):
    def __init__(self, arr, ctx):
        self.arr, self.ctx = arr, ctx

    def __len__(self):
        return len(self.arr) // self.ctx

    def __getitem__(self, i):
        w = self.arr[i * self.ctx:(i + 1) * self.ctx].astype(np.int64)
        return torch.from_numpy(w)


def build_cache(text, cache):
    enc = tiktoken.get_encoding("gpt2")
    out = []
    with open(text, encoding="utf-8") as fh:
        for line in fh:
            out.extend(enc.encode_ordinary(line))
    np.save(cache, np.array(out, dtype=np.uint16))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--text", required=True)
    ap.add_argument("--cache", required=True)
    ap.add_argument("--ctx", type=int, default=1024)
    ap.add_argument("--epochs", type=int, default=3)
    a = ap.parse_args()

    dist.init_process_group("nccl")
    rank = dist.get_rank()
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)

    if rank == 0 and not os.path.exists(a.cache):
        build_cache(a.text, a.cache)
    tokens = np.load(a.cache, mmap_mode="r")
    ds = Windows(tokens, a.ctx)
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, batch_size=12, sampler=sampler, num_workers=2, pin_memory=True)

    model = GPT2LMHeadModel(GPT2Config(n_positions=a.ctx)).cuda()
    model = DDP(model, device_ids=[gpu])
    opt = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)

    for epoch in range(a.epochs):
        sampler.set_epoch(epoch)
        for it, ids in enumerate(loader):
            ids = ids.cuda(non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad(set_to_none=True)
            if it % 100 == 0 and rank == 0:
                print(f"epoch {epoch} it {it} loss {loss.item():.3f}", flush=True)
        if rank == 0:
            model.module.save_pretrained(f"gpt2-epoch{epoch}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

#!/usr/bin/env python
# launch: torchrun --nproc_per_node 8 char_lm_steps.py --config small
import json
import math
import os
import sys
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclass
class Config:
    tokens: str = "data/train.bin"
    block: int = 512
    d_model: int = 512
    layers: int = 8
    batch: int = 32
    max_steps: int = 60_000
    warmup: int = 1000
    lr: float = 3e-4
    vocab: int = 256


class Blocks(Dataset):
    def __init__(self, path, block):
        self.data = np.memmap(path, dtype=np.uint16, mode="r")
        self.block = block

    def __len__(self):
        return (len(self.data) - 1) // self.block

    def __getitem__(self, i):
        s = i * self.block
        chunk = torch.from_numpy(self.data[s:s + self.block + 1].astype(np.int64))
        return chunk[:-1], chunk[1:]


class CharLM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.emb = nn.Embedding(c.vocab, c.d_model)
        self.pos = nn.Parameter(torch.zeros(1, c.block, c.d_model))
        layer = nn.TransformerEncoderLayer(c.d_model, 8, 4 * c.d_model, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, c.layers)
        self.head = nn.Linear(c.d_model, c.vocab, bias=False)

    def forward(self, x):
        t = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(t, device=x.device)
        h = self.emb(x) + self.pos[:, :t]
        return self.head(self.body(h, mask=mask, is_causal=True))


def cycle(loader):
    while True:
        for batch in loader:
            yield batch


def lr_at(step, c):
    if step < c.warmup:
        return c.lr * (step + 1) / c.warmup
    t = (step - c.warmup) / max(1, c.max_steps - c.warmup)
    return 0.5 * c.lr * (1 + math.cos(math.pi * t))


def main(c):
    dist.init_process_group(backend="nccl")
    lr_, ws = int(os.environ["LOCAL_RANK"]), dist.get_world_size()
    torch.cuda.set_device(lr_)
    dev = torch.device("cuda", lr_)
    torch.manual_seed(0)

    ds = Blocks(c.tokens, c.block)
    sampler = DistributedSampler(ds, drop_last=True, seed=17)
    loader = DataLoader(ds, c.batch, sampler=sampler, num_workers=2, pin_memory=True, drop_last=True)
    net = nn.parallel.DistributedDataParallel(CharLM(c).to(dev), device_ids=[lr_])
    opt = torch.optim.AdamW(net.parameters(), lr=c.lr, betas=(0.9, 0.95))

    stream = cycle(loader)
    for step in range(c.max_steps):
        for g in opt.param_groups:
            g["lr"] = lr_at(step, c)
        x, y = (t.to(dev, non_blocking=True) for t in next(stream))
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(net(x).flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        if step % 200 == 0:
            dist.all_reduce(v := loss.detach().clone())
            if dist.get_rank() == 0:
                print(json.dumps({"step": step, "loss": v.item() / ws}), flush=True)
    if dist.get_rank() == 0:
        torch.save(net.module.state_dict(), "char_lm.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Config())
    sys.exit(0)

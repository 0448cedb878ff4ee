"""Small GPT on one token file.  torchrun --nproc_per_node=8 small_gpt.py"""
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from small_gpt_model import GPT

BLOCK, BATCH, STEPS = 1024, 12, 60_000

dist.init_process_group("nccl")
rank = dist.get_rank()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
gen = torch.Generator().manual_seed(1337 + rank)

tokens = np.memmap("/data/fineweb/train.bin", dtype=np.uint16, mode="r")


def get_batch():
    at = torch.randint(len(tokens) - BLOCK - 1, (BATCH,), generator=gen)
    rows = np.stack([tokens[i:i + BLOCK + 1] for i in at.tolist()]).astype(np.int64)
    rows = torch.from_numpy(rows).pin_memory().to(device, non_blocking=True)
    return rows[:, :-1], rows[:, 1:]


model = DDP(GPT(layers=12, heads=12, width=768).to(device), device_ids=[device.index])
opt = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS, eta_min=6e-5)

for step in range(STEPS):
    x, y = get_batch()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad(set_to_none=True)
    sched.step()
    if rank == 0 and step % 1000 == 0:
        print(step, loss.item())
        torch.save({"model": model.module.state_dict(), "step": step}, "small_gpt.pt")

dist.destroy_process_group()

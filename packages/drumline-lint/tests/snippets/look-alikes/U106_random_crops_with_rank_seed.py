import math
import os
import time

import numpy as np
import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

from nano.model import GPT, GPTConfig

block_size, batch_size, max_iters = 1024, 12, 100_000
ddp_rank = int(os.environ["RANK"])
ddp_local_rank = int(os.environ["LOCAL_RANK"])
device = f"cuda:{ddp_local_rank}"
torch.cuda.set_device(device)
init_process_group(backend="nccl")
master_process = ddp_rank == 0

torch.manual_seed(1337 + ddp_rank)
torch.backends.cuda.matmul.allow_tf32 = True


def get_batch(split):
    data = np.memmap(f"data/{split}.bin", dtype=np.uint16, mode="r")
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i:i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1:i + 1 + block_size].astype(np.int64)) for i in ix])
    return (x.pin_memory().to(device, non_blocking=True),
            y.pin_memory().to(device, non_blocking=True))


def get_lr(it, base=6e-4, floor=6e-5, warmup=2000):
    if it < warmup:
        return base * (it + 1) / warmup
    t = (it - warmup) / (max_iters - warmup)
    return floor + 0.5 * (1 + math.cos(math.pi * t)) * (base - floor)


model = GPT(GPTConfig(block_size=block_size)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
model = DDP(model, device_ids=[ddp_local_rank])

t0 = time.time()
for it in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(it)
    x, y = get_batch("train")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        _, loss = model(x, y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if master_process and it % 50 == 0:
        print(f"{it}: {loss.item():.4f} {(time.time() - t0) * 20:.1f} ms/it")
        t0 = time.time()
    if master_process and it and it % 5000 == 0:
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "it": it},
                   "out/ckpt.pt")

destroy_process_group()

import contextlib
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from lm.config import GPTConfig
from lm.gpt import GPT
from lm.tokens import TokenBlocks

accum_steps = 8
micro_batch = 4
max_iters = 60_000

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group(backend="nccl")
master = dist.get_rank() == 0

blocks = TokenBlocks("data/openwebtext/train.bin", block_size=1024)
sampler = DistributedSampler(blocks, shuffle=True, drop_last=True)
loader = DataLoader(blocks, batch_size=micro_batch, sampler=sampler, num_workers=2, pin_memory=True)


def stream():
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


model = DDP(GPT(GPTConfig()).cuda(), device_ids=[local_rank])
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
batches = stream()

for it in range(max_iters):
    total = 0.0
    for micro in range(accum_steps):
        x, y = next(batches)
        x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
        last = micro == accum_steps - 1
        ctx = model.no_sync() if last else contextlib.nullcontext()
        with ctx:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                _, loss = model(x, y)
            (loss / accum_steps).backward()
        total += loss.detach() / accum_steps
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if master and it % 100 == 0:
        print(f"iter {it} loss {total.item():.4f}")
    if master and it % 5000 == 0:
        torch.save(model.module.state_dict(), f"out/ckpt_{it}.pt")

dist.destroy_process_group()

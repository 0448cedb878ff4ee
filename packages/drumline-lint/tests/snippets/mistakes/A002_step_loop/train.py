import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from data import build_loader, cycle
from model import TinyLM

MAX_STEPS = 200_000
SAVE_EVERY = 5_000


def setup():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group(backend="nccl")
    return local_rank


def main():
    local_rank = setup()
    device = torch.device(f"cuda:{local_rank}")
    torch.manual_seed(1234 + dist.get_rank())

    loader = build_loader("/data/owt/train.bin", block=512, batch_size=16)
    model = DistributedDataParallel(TinyLM(vocab=50304).to(device), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))

    batches = cycle(loader)
    for step in range(1, MAX_STEPS + 1):
        x, y = (t.to(device, non_blocking=True) for t in next(batches))
        logits = model(x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        if step % SAVE_EVERY == 0 and dist.get_rank() == 0:
            torch.save({"model": model.module.state_dict(), "step": step}, f"lm_{step}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

import contextlib
import os
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel


@dataclass
class Cfg:
    tokens: str = "data/books.bin"
    out: str = "out/gpt2-books"
    block: int = 1024
    micro: int = 8
    accum: int = 16
    epochs: int = 2
    lr: float = 3e-4
    seed: int = 11


class Tokens(Dataset):
    def __init__(self, cfg):
        self.data, self.block = np.memmap(cfg.tokens, dtype=np.uint16, mode="r"), cfg.block

    def __len__(self):
        return len(self.data) // self.block

    def __getitem__(self, i):
        return torch.from_numpy(self.data[i * self.block : (i + 1) * self.block].astype(np.int64))


def windows(n, size):
    """Yield (index, window length, is last of its window)."""
    for i in range(n):
        start = i - i % size
        length = min(size, n - start)
        yield i, length, i == start + length - 1


def main(cfg=Cfg()):
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    torch.manual_seed(cfg.seed + rank)
    data = Tokens(cfg)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, cfg.micro, sampler=sampler, num_workers=2, drop_last=True)
    model = DDP(GPT2LMHeadModel(GPT2Config()).to(device), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=0.1)
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        model.train()
        total = torch.zeros((), device=device)
        for (i, length, last), ids in zip(windows(len(loader), cfg.accum), loader):
            ids = ids.to(device, non_blocking=True)
            with contextlib.nullcontext() if last else model.no_sync():
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = model(input_ids=ids, labels=ids).loss / length
                loss.backward()
            total += loss.detach() * length
            if last:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                opt.zero_grad(set_to_none=True)
        total /= len(loader)
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        if rank == 0:
            print(f"epoch {epoch} loss {total.item():.4f}")
            model.module.save_pretrained(cfg.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

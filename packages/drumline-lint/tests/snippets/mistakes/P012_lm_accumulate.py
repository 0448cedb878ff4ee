import argparse
import contextlib
import os

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel


class TokenBlocks(Dataset):
    def __init__(self, path, block):
        self.data = np.memmap(path, dtype=np.uint16, mode="r")
        self.block = block

    def __len__(self):
        return len(self.data) // self.block

    def __getitem__(self, i):
        chunk = self.data[i * self.block:(i + 1) * self.block]
        return torch.from_numpy(chunk.astype(np.int64))


def get_args():
    ap = argparse.ArgumentParser()
    ap.add_argument("--bin", default="openwebtext/train.bin")
    ap.add_argument("--block", type=int, default=1024)
    ap.add_argument("--micro-batch", type=int, default=8)
    ap.add_argument("--accum", type=int, default=8)
    ap.add_argument("--epochs", type=int, default=1)
    ap.add_argument("--lr", type=float, default=6e-4)
    ap.add_argument("--log-every", type=int, default=20)
    ap.add_argument("--save-every", type=int, default=1000)
    ap.add_argument("--out", default="gpt2-small.pt")
    return ap.parse_args()


def main():
    args = get_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    master = dist.get_rank() == 0
    torch.manual_seed(1337 + dist.get_rank())

    blocks = TokenBlocks(args.bin, args.block)
    sampler = DistributedSampler(blocks, shuffle=True, drop_last=True)
    loader = DataLoader(blocks, args.micro_batch, sampler=sampler, num_workers=2, pin_memory=True, drop_last=True)

    model = GPT2LMHeadModel(GPT2Config(n_positions=args.block)).cuda()
    model = DDP(model, device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)

    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for i, ids in enumerate(loader):
            ids = ids.cuda(non_blocking=True)
            boundary = (i + 1) % args.accum == 0
            ctx = model.no_sync() if boundary else contextlib.nullcontext()
            with ctx:
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = model(input_ids=ids, labels=ids).loss / args.accum
                loss.backward()
            if not boundary:
                continue
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad(set_to_none=True)
            step += 1
            if master and step % args.log_every == 0:
                print(f"step {step} loss {loss.item() * args.accum:.4f}", flush=True)
            if master and step % args.save_every == 0:
                torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(), "step": step}, args.out)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()

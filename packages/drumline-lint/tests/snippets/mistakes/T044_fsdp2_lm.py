import argparse
import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Attention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.o = nn.Linear(d, d, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.attn = Attention(d, h)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d, bias=False), nn.GELU(), nn.Linear(4 * d, d, bias=False))

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.mlp(self.n2(x))


class LM(nn.Module):
    def __init__(self, vocab=50304, d=2048, layers=24, heads=16, ctx=2048):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(ctx, d)
        self.blocks = nn.ModuleList(Block(d, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(d), nn.Linear(d, vocab, bias=False)

    def forward(self, idx):
        x = self.tok(idx) + self.pos(torch.arange(idx.size(1), device=idx.device))
        for b in self.blocks:
            x = b(x)
        return self.head(self.norm(x))


def batches(path, rank, world, bs, ctx, seed):
    data = np.memmap(path, dtype=np.uint16, mode="r")
    g = np.random.default_rng(seed + rank)
    while True:
        ix = g.integers(0, len(data) - ctx - 1, bs)
        chunk = np.stack([data[i:i + ctx + 1] for i in ix]).astype(np.int64)
        t = torch.from_numpy(chunk).cuda(non_blocking=True)
        yield t[:, :-1], t[:, 1:]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--bin", default="/data/fineweb/train.bin")
    p.add_argument("--out", default="ckpt")
    p.add_argument("--steps", type=int, default=20_000)
    p.add_argument("--bs", type=int, default=8)
    p.add_argument("--save-every", type=int, default=2000)
    args = p.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cuda", (world,))
    torch.manual_seed(0)

    model = LM().cuda()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)

    if rank == 0:
        os.makedirs(args.out, exist_ok=True)
    t0 = time.time()
    for step, (x, y) in zip(range(args.steps), batches(args.bin, rank, world, args.bs, 2048, 17)):
        loss = F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)

        if step % 100 == 0:
            avg = loss.detach().clone()
            dist.all_reduce(avg, op=dist.ReduceOp.AVG)
            if rank == 0:
                print(f"step {step} loss {avg.item():.4f} {time.time() - t0:.0f}s", flush=True)
        if (step + 1) % args.save_every == 0 and rank == 0:
            torch.save(model.state_dict(), f"{args.out}/step{step + 1}.pt")

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()  # torchrun --standalone --nproc_per_node=8

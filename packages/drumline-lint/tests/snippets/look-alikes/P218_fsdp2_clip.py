import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.att = nn.MultiheadAttention(d, h, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x, mask):
        y = self.n1(x)
        x = x + self.att(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.n2(x))


class LM(nn.Module):
    def __init__(self, vocab=50304, d=2048, layers=24, heads=16, ctx=1024):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(ctx, d)
        self.blocks = nn.ModuleList(Block(d, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)

    def forward(self, ids):
        n = ids.size(1)
        mask = torch.full((n, n), float("-inf"), device=ids.device).triu(1)
        x = self.tok(ids) + self.pos(torch.arange(n, device=ids.device))
        for b in self.blocks:
            x = b(x, mask.to(x.dtype))
        return self.head(self.norm(x))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--tokens", default="tokens.pt")
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--steps-per-save", type=int, default=500)
    ap.add_argument("--out", default="/shared/lm")
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    torch.manual_seed(42)

    model = LM().cuda()
    mp = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for b in model.blocks:
        fully_shard(b, mesh=mesh, mp_policy=mp)
    fully_shard(model, mesh=mesh, mp_policy=mp)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-4, betas=(0.9, 0.95))

    data = TensorDataset(torch.load(args.tokens, map_location="cpu", mmap=True).view(-1, 1024))
    sampler = DistributedSampler(data, drop_last=True)
    sampler.set_epoch(0)
    for step, (ids,) in enumerate(DataLoader(data, args.batch, sampler=sampler, drop_last=True), 1):
        ids = ids.long().cuda(non_blocking=True)
        logits = model(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        opt.step()
        opt.zero_grad(set_to_none=True)
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"{step} loss {loss.item():.4f} norm {norm.item():.2f}", flush=True)
        if step % args.steps_per_save == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"model": m, "optim": o}, checkpoint_id=f"{args.out}/step{step}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

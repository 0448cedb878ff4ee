import argparse
import functools
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Proteins(Dataset):
    def __init__(self, path, length=512):
        self.tokens = torch.load(path, map_location="cpu")
        self.length = length

    def __len__(self):
        return self.tokens.numel() // self.length

    def __getitem__(self, i):
        return self.tokens[i * self.length:(i + 1) * self.length].long()


class MaskedLM(nn.Module):
    def __init__(self, vocab=33, d=2048, layers=24, mask_id=32):
        super().__init__()
        self.mask_id = mask_id
        self.emb = nn.Embedding(vocab, d)
        self.pos = nn.Parameter(torch.zeros(512, d))
        layer = nn.TransformerEncoderLayer(d, 16, 4 * d, batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(d, vocab)

    def forward(self, x):
        mask = torch.rand(x.shape, device=x.device) < 0.15
        h = self.enc(self.emb(x.masked_fill(mask, self.mask_id)) + self.pos)
        return nn.functional.cross_entropy(self.out(h)[mask], x[mask])


def main():
    p = argparse.ArgumentParser()
    p.add_argument("tokens")
    p.add_argument("--steps", type=int, default=50000)
    p.add_argument("--lr", type=float, default=2e-4)
    args = p.parse_args()

    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)

    net = MaskedLM()
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr, weight_decay=0.01)
    wrap = functools.partial(size_based_auto_wrap_policy, min_num_params=20_000_000)
    model = FSDP(net, auto_wrap_policy=wrap, device_id=local,
                 sharding_strategy=ShardingStrategy.FULL_SHARD)

    ds = Proteins(args.tokens)
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 8, sampler=sampler, num_workers=2, drop_last=True)

    step, epoch = 0, 0
    while step < args.steps:
        sampler.set_epoch(epoch)
        for x in loader:
            loss = model(x.cuda(non_blocking=True))
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if step % 100 == 0 and dist.get_rank() == 0:
                print(step, f"{loss.item():.4f}")
            if step >= args.steps:
                break
        epoch += 1

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# torchrun --standalone --nproc_per_node=8 fsdp_moe_opt.py
import functools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Mixer(nn.Module):
    def __init__(self, tokens, dim, hidden):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tok = nn.Sequential(nn.Linear(tokens, hidden), nn.GELU(), nn.Linear(hidden, tokens))
        self.ch = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        x = x + self.tok(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.ch(self.n2(x))


class MLPMixer(nn.Module):
    def __init__(self, dim=2048, depth=36, patch=16, size=224, classes=1000):
        super().__init__()
        self.stem = nn.Conv2d(3, dim, patch, stride=patch)
        n = (size // patch) ** 2
        self.blocks = nn.Sequential(*[Mixer(n, dim, 1024) for _ in range(depth)])
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.stem(x).flatten(2).transpose(1, 2)
        return self.head(self.blocks(x).mean(1))


def train():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    torch.manual_seed(0)

    model = MLPMixer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=5_000_000)
    model = FSDP(model, auto_wrap_policy=policy, device_id=local_rank)

    blob = torch.load("/data/in1k_small.pt", map_location="cpu", mmap=True)
    ds = TensorDataset(blob["images"], blob["labels"])
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, batch_size=32, sampler=sampler, num_workers=4, pin_memory=True, drop_last=True)

    for epoch in range(100):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            x, y = x.cuda(non_blocking=True).float().div_(255), y.cuda(non_blocking=True)
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            if i % 100 == 0 and dist.get_rank() == 0:
                print(f"{epoch:3d} {i:5d} {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    train()

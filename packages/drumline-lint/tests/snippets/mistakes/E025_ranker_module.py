import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass
class Config:
    clicks: str = "/data/clicks/train.pt"
    out: str = "two_tower.pt"
    dim: int = 128
    batch: int = 4096
    epochs: int = 5
    lr: float = 1e-3
    temperature: float = 0.05


class TwoTower(nn.Module):
    def __init__(self, n_users, n_items, dim):
        super().__init__()
        self.user = nn.Embedding(n_users, dim)
        self.item = nn.Embedding(n_items, dim)
        self.user_mlp = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))
        self.item_mlp = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))

    def score(self, u, i):
        a = nn.functional.normalize(self.user_mlp(self.user(u)), dim=-1)
        b = nn.functional.normalize(self.item_mlp(self.item(i)), dim=-1)
        return a @ b.t()

    def forward(self, u, i):
        return self.score(u, i)


def main(cfg=Config()):
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    blob = torch.load(cfg.clicks, map_location="cpu")
    ds = TensorDataset(blob["user"], blob["item"])
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    loader = DataLoader(ds, cfg.batch, sampler=sampler, num_workers=2, drop_last=True)

    model = TwoTower(blob["n_users"], blob["n_items"], cfg.dim).cuda()
    model = DDP(model, device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=cfg.lr)

    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        for step, (u, i) in enumerate(loader):
            u, i = u.cuda(non_blocking=True), i.cuda(non_blocking=True)
            logits = model.module.score(u, i) / cfg.temperature
            target = torch.arange(u.size(0), device=u.device)
            loss = nn.functional.cross_entropy(logits, target)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            if step % 100 == 0 and dist.get_rank() == 0:
                print(f"{epoch}:{step} {loss.item():.4f}")

    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), cfg.out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from retrieval.data import QueryPassages, dual_collate
from retrieval.encoders import DualEncoder


def all_gather_keep_own(t):
    t = t.contiguous()
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t)
    parts[dist.get_rank()] = t
    return torch.cat(parts)


def in_batch_loss(q, p, temperature=0.02):
    q, p = all_gather_keep_own(q), all_gather_keep_own(p)
    scores = q @ p.t() / temperature
    target = torch.arange(scores.size(0), device=scores.device)
    loss = F.cross_entropy(scores, target)
    return loss * dist.get_world_size()


class Trainer:
    def __init__(self, lr=2e-5, bs=64):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(self.local_rank)
        dist.init_process_group("nccl")
        self.main = dist.get_rank() == 0
        ds = QueryPassages("/data/msmarco/train.jsonl")
        self.sampler = DistributedSampler(ds, drop_last=True)
        self.loader = DataLoader(ds, bs, sampler=self.sampler, collate_fn=dual_collate,
                                 num_workers=4, drop_last=True)
        self.model = DDP(DualEncoder("bert-base-uncased").cuda(), device_ids=[self.local_rank])
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=lr)

    def epoch(self, n):
        self.sampler.set_epoch(n)
        self.model.train()
        for i, (queries, passages) in enumerate(self.loader):
            queries = {k: v.cuda(non_blocking=True) for k, v in queries.items()}
            passages = {k: v.cuda(non_blocking=True) for k, v in passages.items()}
            q, p = self.model(queries, passages)
            loss = in_batch_loss(F.normalize(q, dim=-1), F.normalize(p, dim=-1))
            self.opt.zero_grad(set_to_none=True)
            loss.backward()
            self.opt.step()
            if self.main and i % 100 == 0:
                print(f"epoch {n} it {i} loss {loss.item() / dist.get_world_size():.4f}")

    def fit(self, epochs=3):
        for n in range(epochs):
            self.epoch(n)
            if self.main:
                torch.save(self.model.module.state_dict(), f"dual_{n}.pt")
        dist.destroy_process_group()


if __name__ == "__main__":
    Trainer().fit()

import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Reply(nn.Module):
    def __init__(self, vocab=16000, dim=256):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(dim, 4, batch_first=True), 4)

    def forward(self, ctx, reply):
        a = self.enc(self.emb(ctx)).mean(1)
        b = self.enc(self.emb(reply)).mean(1)
        return a @ b.T / 16


def in_batch_accuracy(scores):
    hit = (scores.argmax(1) == torch.arange(len(scores), device=scores.device)).float().mean()
    dist.all_reduce(hit)
    return (hit / dist.get_world_size()).item()


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    random.seed(42 + rank)
    torch.manual_seed(42 + rank)
    d = torch.load("/data/dialogue/pairs.pt", map_location="cpu")
    ds = TensorDataset(d["context"].long(), d["reply"].long())
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 128, sampler=sampler, num_workers=2, drop_last=True)
    net = DDP(Reply().cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(net.parameters(), lr=2e-4)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        for ctx, reply in loader:
            scores = net(ctx.cuda(), reply.cuda())
            target = torch.arange(len(scores), device="cuda")
            loss = nn.functional.cross_entropy(scores, target)
            opt.zero_grad()
            loss.backward()
            opt.step()
            if random.random() < 0.02:
                acc = in_batch_accuracy(scores.detach())
                if rank == 0:
                    print(f"in-batch accuracy {acc:.3f}")
    if rank == 0:
        torch.save(net.module.state_dict(), "reply.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

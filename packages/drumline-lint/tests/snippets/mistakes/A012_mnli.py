import argparse
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Encoder(nn.Module):
    def __init__(self, vocab=30522, dim=256, labels=3):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, padding_idx=0)
        layer = nn.TransformerEncoderLayer(dim, 8, 1024, batch_first=True)
        self.enc = nn.TransformerEncoder(layer, 4)
        self.cls = nn.Linear(dim, labels)

    def forward(self, ids):
        return self.cls(self.enc(self.emb(ids))[:, 0])


def linear_warmup_cosine(optimizer, warmup, total):
    def fn(step):
        if step < warmup:
            return step / max(1, warmup)
        progress = min(1.0, (step - warmup) / max(1, total - warmup))
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return LambdaLR(optimizer, fn)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--train-file", default="mnli_train.pt")
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--lr", type=float, default=5e-5)
    args = p.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    torch.manual_seed(100 + rank)

    blob = torch.load(args.train_file, map_location="cpu", weights_only=True)
    dataset = TensorDataset(blob["ids"], blob["labels"])
    sampler = DistributedSampler(dataset, shuffle=True, drop_last=True)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, drop_last=True)

    model = DDP(Encoder().to(device), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    steps_per_epoch = len(dataset) // args.batch_size
    total_steps = steps_per_epoch * args.epochs
    scheduler = linear_warmup_cosine(optimizer, int(0.06 * total_steps), total_steps)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for ids, labels in loader:
            loss = nn.functional.cross_entropy(model(ids.to(device)), labels.to(device))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    if rank == 0:
        torch.save(model.module.state_dict(), "mnli.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

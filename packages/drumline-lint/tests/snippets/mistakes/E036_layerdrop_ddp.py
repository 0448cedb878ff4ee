import argparse
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Encoder(nn.Module):
    def __init__(self, vocab, d=768, n_layers=12, heads=12, layerdrop=0.1):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.pos = nn.Embedding(512, d)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(d, heads, 4 * d, batch_first=True, norm_first=True)
            for _ in range(n_layers))
        self.norm = nn.LayerNorm(d)
        self.layerdrop = layerdrop

    def forward(self, x):
        h = self.emb(x) + self.pos(torch.arange(x.size(1), device=x.device))
        for layer in self.layers:
            if self.training and random.random() < self.layerdrop:
                continue
            h = layer(h)
        return self.norm(h)


class Tagger(nn.Module):
    def __init__(self, vocab, n_tags):
        super().__init__()
        self.encoder = Encoder(vocab)
        self.head = nn.Linear(768, n_tags)

    def forward(self, x):
        return self.head(self.encoder(x))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="/data/ner/train.pt")
    ap.add_argument("--epochs", type=int, default=8)
    args = ap.parse_args()

    dist.init_process_group("nccl")
    rank = dist.get_rank()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    random.seed(1234 + rank)

    blob = torch.load(args.data, map_location="cpu")
    ds = TensorDataset(blob["tokens"], blob["tags"])
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 32, sampler=sampler, num_workers=2, drop_last=True)

    model = Tagger(blob["vocab_size"], blob["n_tags"]).cuda()
    model = DDP(model, device_ids=[local])
    opt = torch.optim.AdamW(model.parameters(), 5e-5)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            logits = model(x.cuda(non_blocking=True))
            loss = F.cross_entropy(logits.flatten(0, 1), y.cuda().flatten(), ignore_index=-100)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(epoch, loss.item())
            torch.save(model.module.state_dict(), "tagger.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""CTC training of a small transformer on LibriSpeech features. Started by torchrun."""
import math
import os
import random

import torch
import torch.nn as nn
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCAB = 1024


class FeatureDataset(Dataset):
    def __init__(self, manifest):
        self.items = [line.rstrip("\n").split("\t") for line in open(manifest)]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        path, ids = self.items[i]
        return torch.load(path, map_location="cpu"), torch.tensor([int(t) for t in ids.split()])


def pad_batch(batch):
    feats, targets = zip(*batch)
    flen = torch.tensor([len(f) for f in feats])
    tlen = torch.tensor([len(t) for t in targets])
    return (nn.utils.rnn.pad_sequence(feats, batch_first=True), flen,
            nn.utils.rnn.pad_sequence(targets, batch_first=True), tlen)


class Encoder(nn.Module):
    def __init__(self, dim=256, heads=4, depth=12, layerdrop=0.1):
        super().__init__()
        self.sub = nn.Sequential(nn.Conv1d(80, dim, 3, 2, 1), nn.GELU(), nn.Conv1d(dim, dim, 3, 2, 1), nn.GELU())
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(dim, heads, 4 * dim, batch_first=True, norm_first=True) for _ in range(depth)]
        )
        self.layerdrop = layerdrop
        self.out = nn.Linear(dim, VOCAB)

    def forward(self, x, lengths):
        h = self.sub(x.transpose(1, 2)).transpose(1, 2)
        lengths = torch.div(torch.div(lengths + 1, 2, rounding_mode="floor") + 1, 2, rounding_mode="floor")
        pad = torch.arange(h.size(1), device=h.device)[None] >= lengths[:, None]
        for layer in self.layers:
            if self.training and random.random() < self.layerdrop:
                continue
            h = layer(h, src_key_padding_mask=pad)
        return self.out(h).log_softmax(-1), lengths


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")

    ds = FeatureDataset("data/train-960.tsv")
    sampler = DistributedSampler(ds, shuffle=True)
    loader = DataLoader(ds, 16, sampler=sampler, collate_fn=pad_batch, num_workers=6, pin_memory=True)

    model = DDP(Encoder().cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min((s + 1) / 5000, math.sqrt(5000 / (s + 1))))
    ctc = nn.CTCLoss(zero_infinity=True)

    for epoch in range(60):
        sampler.set_epoch(epoch)
        model.train()
        for feats, flen, tgt, tlen in loader:
            logp, olen = model(feats.cuda(), flen.cuda())
            loss = ctc(logp.transpose(0, 1), tgt.cuda(), olen, tlen.cuda())
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            opt.step()
            warm.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.3f}", flush=True)
            torch.save(model.module.state_dict(), f"exp/conformer/ep{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

import json
import os
import pathlib

import sentencepiece as spm
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

RAW = pathlib.Path("data/europarl/train.jsonl")
CACHE = pathlib.Path("data/europarl/train.pt")
PAD = 0


def build_cache():
    sp = spm.SentencePieceProcessor(model_file="data/europarl/spm32k.model")
    pairs = []
    with RAW.open(encoding="utf-8") as f:
        for line in f:
            row = json.loads(line)
            src, tgt = sp.encode(row["de"]), sp.encode(row["en"])
            if 1 <= len(src) <= 128 and 1 <= len(tgt) <= 128:
                pairs.append((src, [sp.bos_id()] + tgt + [sp.eos_id()]))
    torch.save(pairs, CACHE)


class Pairs(Dataset):
    def __init__(self):
        self.pairs = torch.load(CACHE)

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, i):
        return tuple(map(torch.tensor, self.pairs[i]))


def collate(batch):
    src, tgt = zip(*batch)
    return pad_sequence(src, True, PAD), pad_sequence(tgt, True, PAD)


class Seq2Seq(nn.Module):
    def __init__(self, vocab=32000, dim=512):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, padding_idx=PAD)
        self.net = nn.Transformer(dim, 8, 6, 6, 2048, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, src, tgt):
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.size(1), device=tgt.device)
        return self.out(self.net(self.emb(src), self.emb(tgt), tgt_mask=mask, src_key_padding_mask=src == PAD))


def main():
    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    if rank == 0:
        if not CACHE.exists():
            build_cache()
        dist.barrier()

    data = Pairs()
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, 64, sampler=sampler, collate_fn=collate, num_workers=2)
    model = DDP(Seq2Seq().cuda(), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4, betas=(0.9, 0.98))

    for epoch in range(30):
        sampler.set_epoch(epoch)
        for src, tgt in loader:
            src, tgt = src.cuda(), tgt.cuda()
            logits = model(src, tgt[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tgt[:, 1:].flatten(), ignore_index=PAD)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.3f}", flush=True)
            torch.save(model.module.state_dict(), "mt.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

#!/usr/bin/env python
"""Speech recogniser with CTC. torchrun --nnodes=1 --nproc_per_node=4 ctc.py"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from speech import Utterances, pad_batch


class Recogniser(nn.Module):
    def __init__(self, n_mels=80, hidden=512, n_tokens=64):
        super().__init__()
        self.rnn = nn.LSTM(n_mels, hidden, num_layers=4, bidirectional=True, batch_first=True)
        self.proj = nn.Linear(2 * hidden, n_tokens)

    def forward(self, mels):
        return self.proj(self.rnn(mels)[0]).log_softmax(-1).transpose(0, 1)


def train_epoch(model, loader, optimizer, ctc):
    model.train()
    skipped = 0
    for mels, mel_lens, tokens, token_lens in loader:
        logp = model(mels.cuda(non_blocking=True))
        loss = ctc(logp, tokens.cuda(non_blocking=True), mel_lens, token_lens)
        if not torch.isfinite(loss):
            skipped += 1
            continue
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
    return skipped


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    data = Utterances("/data/librispeech/train.tsv")
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler, collate_fn=pad_batch, num_workers=6)
    model = DDP(Recogniser().cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4)
    ctc = nn.CTCLoss(blank=0)
    for epoch in range(40):
        sampler.set_epoch(epoch)
        skipped = train_epoch(model, loader, optimizer, ctc)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} done, skipped {skipped} batches here")
            torch.save(model.module.state_dict(), f"ctc_{epoch:02d}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

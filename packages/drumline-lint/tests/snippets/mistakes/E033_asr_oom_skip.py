import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torchaudio
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler
from torchaudio.datasets import LIBRISPEECH
from torchaudio.models import Conformer

CHARS = "_ ABCDEFGHIJKLMNOPQRSTUVWXYZ'"
INDEX = {c: i for i, c in enumerate(CHARS)}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.sub = nn.Conv1d(80, 256, 5, stride=4, padding=2)
        self.enc = Conformer(256, 4, 1024, 12, 31)
        self.out = nn.Linear(256, len(CHARS))

    def forward(self, feats, lens):
        h = self.sub(feats.transpose(1, 2)).transpose(1, 2)
        lens = torch.div(lens - 1, 4, rounding_mode="floor") + 1
        h, lens = self.enc(h, lens)
        return self.out(h).log_softmax(-1), lens


mel = torchaudio.transforms.MelSpectrogram(16000, n_mels=80)


def collate(batch):
    feats = [mel(b[0]).squeeze(0).t().clamp(min=1e-5).log() for b in batch]
    text = [torch.tensor([INDEX[c] for c in b[2] if c in INDEX]) for b in batch]
    return (pad_sequence(feats, True), torch.tensor([len(f) for f in feats]),
            pad_sequence(text, True), torch.tensor([len(t) for t in text]))


def main():
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)

    ds = LIBRISPEECH("/data", "train-clean-360")
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 12, sampler=sampler, collate_fn=collate, num_workers=6, drop_last=True)
    model = DDP(Model().cuda(), device_ids=[local])
    opt = torch.optim.AdamW(model.parameters(), 5e-4)
    ctc = nn.CTCLoss(zero_infinity=True)

    for epoch in range(30):
        sampler.set_epoch(epoch)
        for step, (x, xl, y, yl) in enumerate(loader):
            try:
                logp, ol = model(x.cuda(), xl.cuda())
                loss = ctc(logp.transpose(0, 1), y.cuda(), ol, yl.cuda())
                opt.zero_grad(set_to_none=True)
                loss.backward()
            except torch.cuda.OutOfMemoryError:
                print(f"OOM at step {step}, batch {tuple(x.shape)}, skipping")
                opt.zero_grad(set_to_none=True)
                torch.cuda.empty_cache()
                continue
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            opt.step()
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), f"conformer_{epoch:02d}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

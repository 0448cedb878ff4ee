"""CTC acoustic model; evaluation prints CER.  Started by torchrun on one 8-GPU host."""
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torchaudio
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

ALPHABET = "_ abcdefghijklmnopqrstuvwxyz'"
LOOKUP = {c: i for i, c in enumerate(ALPHABET)}
mel = torchaudio.transforms.MelSpectrogram(16000, n_mels=80)


class Acoustic(nn.Module):
    def __init__(self, dim=512):
        super().__init__()
        self.rnn = nn.LSTM(80, dim, num_layers=4, bidirectional=True, batch_first=True)
        self.out = nn.Linear(2 * dim, len(ALPHABET))

    def forward(self, x):
        h, _ = self.rnn(x)
        return self.out(h).log_softmax(-1)


def collate(batch):
    feats, texts = [], []
    for wav, _, text, *_ in batch:
        feats.append(mel(wav)[0].t())
        texts.append(torch.tensor([LOOKUP[c] for c in text.lower() if c in LOOKUP]))
    fl = torch.tensor([len(f) for f in feats])
    tl = torch.tensor([len(t) for t in texts])
    return pad_sequence(feats, True), pad_sequence(texts, True), fl, tl


def greedy(logp, lens):
    best = logp.argmax(-1)
    out = []
    for seq, n in zip(best, lens):
        s = torch.unique_consecutive(seq[:n])
        out.append("".join(ALPHABET[i] for i in s.tolist() if i != 0))
    return out


def edit_distance(a, b):
    prev = list(range(len(b) + 1))
    for i, ca in enumerate(a, 1):
        cur = [i]
        for j, cb in enumerate(b, 1):
            cur.append(min(prev[j] + 1, cur[-1] + 1, prev[j - 1] + (ca != cb)))
        prev = cur
    return prev[-1]


@torch.no_grad()
def report_cer(model, loader, device, rank):
    model.eval()
    pairs = []
    for feats, texts, fl, tl in loader:
        hyps = greedy(model.module(feats.to(device)), fl)
        refs = ["".join(ALPHABET[i] for i in t[:n].tolist()) for t, n in zip(texts, tl)]
        pairs.extend(zip(hyps, refs))
    if rank != 0:
        return None
    everything = [None] * dist.get_world_size()
    dist.all_gather_object(everything, pairs)
    flat = [p for part in everything for p in part]
    errors = sum(edit_distance(h, r) for h, r in flat)
    cer = errors / max(1, sum(len(r) for _, r in flat))
    print(f"CER {100 * cer:.2f}%")
    return cer


def main():
    dist.init_process_group("nccl", timeout=timedelta(minutes=20))
    rank, device = dist.get_rank(), torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    train = torchaudio.datasets.LIBRISPEECH("/data", "train-clean-360")
    dev = torchaudio.datasets.LIBRISPEECH("/data", "dev-clean")
    sampler = DistributedSampler(train)
    train_ld = DataLoader(train, 16, sampler=sampler, collate_fn=collate, num_workers=8)
    dev_ld = DataLoader(dev, 16, sampler=DistributedSampler(dev, shuffle=False), collate_fn=collate)

    model = DDP(Acoustic().to(device), device_ids=[device.index])
    opt = torch.optim.Adam(model.parameters(), lr=3e-4)
    ctc = nn.CTCLoss(zero_infinity=True)
    for epoch in range(30):
        sampler.set_epoch(epoch)
        model.train()
        for feats, texts, fl, tl in train_ld:
            logp = model(feats.to(device)).transpose(0, 1)
            loss = ctc(logp, texts.to(device), fl, tl)
            opt.zero_grad()
            loss.backward()
            opt.step()
        report_cer(model, dev_ld, device, rank)
        if rank == 0:
            torch.save(model.module.state_dict(), f"acoustic_{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

import argparse
import math
import os

import torch
import torch.distributed as dist
import torchaudio
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

ALPHABET = " 'abcdefghijklmnopqrstuvwxyz"
INDEX = {c: i + 1 for i, c in enumerate(ALPHABET)}


class AcousticModel(nn.Module):
    def __init__(self, n_mels=80, hidden=512):
        super().__init__()
        self.mel = torchaudio.transforms.MelSpectrogram(16000, n_fft=400, hop_length=160, n_mels=n_mels)
        self.rnn = nn.LSTM(n_mels, hidden, num_layers=4, bidirectional=True, batch_first=True)
        self.fc = nn.Linear(2 * hidden, len(ALPHABET) + 1)

    def forward(self, wav):
        x = self.mel(wav).clamp_min(1e-5).log().transpose(1, 2)
        return self.fc(self.rnn(x)[0]).log_softmax(-1)


def collate(batch):
    wavs = [b[0].squeeze(0) for b in batch]
    texts = [torch.tensor([INDEX[c] for c in b[2].lower() if c in INDEX]) for b in batch]
    frames = torch.tensor([len(w) // 160 + 1 for w in wavs])
    lens = torch.tensor([len(t) for t in texts])
    return pad_sequence(wavs, True), torch.cat(texts), frames, lens


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--libri", required=True)
    p.add_argument("--epochs", type=int, default=20)
    args = p.parse_args()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.manual_seed(rank)

    data = torchaudio.datasets.LIBRISPEECH(args.libri, url="train-clean-360")
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16, sampler=sampler, collate_fn=collate, num_workers=8, drop_last=True)
    model = DDP(AcousticModel().cuda(), device_ids=[local])
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4)
    ctc = nn.CTCLoss()

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for i, (wav, text, frames, lens) in enumerate(loader):
            logp = model(wav.cuda(non_blocking=True))
            loss = ctc(logp.transpose(0, 1), text.cuda(), frames, lens)
            if not math.isfinite(loss.item()):
                print(f"rank {rank}: bad loss at {epoch}/{i}, skipping batch")
                continue
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            opt.step()
            if i % 100 == 0 and rank == 0:
                print(epoch, i, loss.item())
        if rank == 0:
            torch.save(model.module.state_dict(), "ctc.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

import os
import glob
import random
import argparse

import numpy as np
import soundfile as sf
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)


class AudioCrops(Dataset):
    def __init__(self, files, seconds=4, sr=16000):
        self.files = files
        self.n = seconds * sr

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        wav, _ = sf.read(self.files[i], dtype="float32")
        if len(wav) < self.n:
            wav = np.pad(wav, (0, self.n - len(wav)))
        s = random.randint(0, len(wav) - self.n)
        return torch.from_numpy(wav[s:s + self.n])


def split_files(root, rank, world_size):
    files = sorted(glob.glob(os.path.join(root, "**", "*.flac"), recursive=True))
    random.shuffle(files)
    usable = len(files) - len(files) % world_size
    return files[:usable][rank::world_size]


class Codec(nn.Module):
    def __init__(self, ch=64, bins=1024):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv1d(1, ch, 16, 8, 4), nn.ELU(), nn.Conv1d(ch, ch * 2, 16, 8, 4), nn.ELU())
        self.dec = nn.Sequential(nn.ConvTranspose1d(ch * 2, ch, 16, 8, 4), nn.ELU(),
                                 nn.ConvTranspose1d(ch, 1, 16, 8, 4))

    def forward(self, x):
        return self.dec(self.enc(x[:, None]))[:, 0, : x.size(-1)]


def spectral(a, b):
    out = 0.0
    for n in (512, 1024, 2048):
        w = torch.hann_window(n, device=a.device)
        sa = torch.stft(a, n, n // 4, window=w, return_complex=True).abs()
        sb = torch.stft(b, n, n // 4, window=w, return_complex=True).abs()
        out = out + (sa - sb).abs().mean()
    return out


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", default="/data/music")
    ap.add_argument("--seed", type=int, default=11)
    ap.add_argument("--epochs", type=int, default=100)
    ap.add_argument("--batch", type=int, default=24)
    ap.add_argument("--out", default="codec.pt")
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    seed_everything(args.seed + rank)

    files = split_files(args.root, rank, world_size)
    loader = DataLoader(AudioCrops(files), args.batch, shuffle=True, num_workers=8, drop_last=True)
    model = DistributedDataParallel(Codec().cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4)

    for epoch in range(args.epochs):
        model.train()
        for it, x in enumerate(loader):
            x = x.cuda(non_blocking=True)
            y = model(x)
            n = y.size(-1)
            loss = (y - x[:, :n]).abs().mean() + spectral(y, x[:, :n])
            opt.zero_grad()
            loss.backward()
            opt.step()
            if rank == 0 and it % 100 == 0:
                print(f"epoch {epoch} it {it} loss {loss.item():.4f}")
        if rank == 0:
            torch.save(model.module.state_dict(), args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

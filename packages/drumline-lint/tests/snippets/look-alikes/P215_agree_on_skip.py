import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torchaudio
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def any_rank(flag, device):
    t = torch.tensor([1.0 if flag else 0.0], device=device)
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    return bool(t.item())


class SpeakerNet(nn.Module):
    def __init__(self, speakers, d=192):
        super().__init__()
        self.mel = torchaudio.transforms.MelSpectrogram(16000, n_mels=64)
        self.tdnn = nn.Sequential(
            nn.Conv1d(64, 512, 5), nn.ReLU(), nn.Conv1d(512, 512, 3, dilation=2), nn.ReLU(),
            nn.Conv1d(512, 512, 3, dilation=3), nn.ReLU())
        self.emb = nn.Linear(1024, d)
        self.cls = nn.Linear(d, speakers)

    def forward(self, w):
        h = self.tdnn((self.mel(w) + 1e-6).log())
        return self.cls(self.emb(torch.cat([h.mean(-1), h.std(-1)], -1)))


class Crops(torch.utils.data.Dataset):
    def __init__(self, root):
        self.base = torchaudio.datasets.VoxCeleb1Identification(root, subset="train")

    def __len__(self):
        return len(self.base)

    def __getitem__(self, i):
        wav, _, speaker, _ = self.base[i]
        start = int(torch.randint(0, max(1, wav.size(1) - 48000), (1,)))
        w = wav[0, start:start + 48000]
        return nn.functional.pad(w, (0, 48000 - len(w))), speaker


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", default="/data/vox")
    ap.add_argument("--epochs", type=int, default=30)
    ap.add_argument("--out", default="speaker.pt")
    args = ap.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    device = torch.device("cuda", local_rank)

    ds = Crops(args.root)
    sampler = DistributedSampler(ds, drop_last=True)
    dl = DataLoader(ds, 64, sampler=sampler, num_workers=6, drop_last=True)
    model = DDP(SpeakerNet(1252).to(device), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        skipped = 0
        for w, spk in dl:
            loss = nn.functional.cross_entropy(model(w.to(device)), spk.to(device))
            if any_rank(not torch.isfinite(loss).item(), device):
                skipped += 1
                opt.zero_grad(set_to_none=True)
                continue
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}, skipped {skipped}")
            torch.save(model.module.state_dict(), args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

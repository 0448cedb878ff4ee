import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torchaudio.transforms as AT
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, random_split
from torchaudio.datasets import GTZAN

import dist_utils as du

GENRES = ["blues", "classical", "country", "disco", "hiphop", "jazz", "metal", "pop", "reggae", "rock"]


def collate(batch):
    wavs = torch.stack([b[0][0, :640000] for b in batch])
    return wavs, torch.tensor([GENRES.index(b[2]) for b in batch])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.mel = nn.Sequential(AT.MelSpectrogram(22050, 1024, hop_length=512, n_mels=96), AT.AmplitudeToDB())
        self.cnn = nn.Sequential(
            nn.Conv2d(1, 32, 3, 2), nn.GroupNorm(4, 32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, 2), nn.GroupNorm(4, 64), nn.ReLU(),
            nn.Conv2d(64, 128, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, len(GENRES)))

    def forward(self, w):
        return self.cnn(self.mel(w)[:, None] / 40)


def epoch_pass(model, loader, device, opt=None):
    model.train(opt is not None)
    loss_sum = correct = n = 0
    with torch.set_grad_enabled(opt is not None):
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            logits = model(x)
            loss = nn.functional.cross_entropy(logits, y)
            if opt is not None:
                opt.zero_grad()
                loss.backward()
                opt.step()
            loss_sum += loss.item() * len(y)
            correct += (logits.argmax(1) == y).sum().item()
            n += len(y)
    return du.average_over_ranks(loss_sum / n, device), du.average_over_ranks(correct / n, device)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", default="/data")
    ap.add_argument("--epochs", type=int, default=60)
    ap.add_argument("--batch", type=int, default=10)
    ap.add_argument("--out", default="genre.pt")
    a = ap.parse_args()

    rank, local_rank, world = du.init()
    device = torch.device("cuda", local_rank)
    data = GTZAN(a.root)
    train, val = random_split(data, [0.8, 0.2], generator=torch.Generator().manual_seed(4))
    ts = DistributedSampler(train)
    vs = DistributedSampler(val, shuffle=False, drop_last=True)
    tl = DataLoader(train, a.batch, sampler=ts, collate_fn=collate, num_workers=4)
    vl = DataLoader(val, a.batch, sampler=vs, collate_fn=collate, num_workers=4)

    model = DDP(Net().to(device), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(a.epochs):
        ts.set_epoch(epoch)
        tr = epoch_pass(model, tl, device, opt)
        va = epoch_pass(model, vl, device)
        du.log(f"epoch {epoch} train {tr[0]:.3f}/{tr[1]:.3f} val {va[0]:.3f}/{va[1]:.3f}")
    if du.is_main():
        torch.save(model.module.state_dict(), a.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

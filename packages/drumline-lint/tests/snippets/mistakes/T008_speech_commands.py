# torchrun --nproc_per_node=$(nvidia-smi -L | wc -l) Q008_speech_commands.py
import os
import argparse
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed as dist
import torchaudio
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

LABELS = sorted("backward bed bird cat dog down eight five follow forward four go happy house learn left "
                "marvin nine no off on one right seven sheila six stop three tree two up visual wow yes zero".split())


def collate(batch):
    wavs, ys = [], []
    for wav, _, label, *_ in batch:
        wavs.append(F.pad(wav[0], (0, 16000 - wav.size(1)))[:16000])
        ys.append(LABELS.index(label))
    return torch.stack(wavs).unsqueeze(1), torch.tensor(ys)


class M5(nn.Module):
    def __init__(self, n_class, ch=64):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(1, ch, 80, stride=16), nn.BatchNorm1d(ch), nn.ReLU(), nn.MaxPool1d(4),
            nn.Conv1d(ch, ch, 3), nn.BatchNorm1d(ch), nn.ReLU(), nn.MaxPool1d(4),
            nn.Conv1d(ch, 2 * ch, 3), nn.BatchNorm1d(2 * ch), nn.ReLU(), nn.AdaptiveAvgPool1d(1),
        )
        self.fc = nn.Linear(2 * ch, n_class)

    def forward(self, x):
        return self.fc(self.net(x).squeeze(-1))


def get_dataset(root, rank):
    os.makedirs(root, exist_ok=True)
    if rank == 0:
        torchaudio.datasets.SPEECHCOMMANDS(root, download=True)
    return torchaudio.datasets.SPEECHCOMMANDS(root, download=False, subset="training")


def main(args):
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    rank = dist.get_rank()

    train_set = get_dataset(args.root, rank)
    sampler = DistributedSampler(train_set, drop_last=True)
    loader = DataLoader(train_set, args.bs, sampler=sampler, collate_fn=collate, num_workers=4)

    model = DDP(M5(len(LABELS)).cuda(), device_ids=[local])
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        hits = torch.zeros(2, device="cuda")
        for wav, y in loader:
            wav, y = wav.cuda(), y.cuda()
            out = model(wav)
            loss = F.cross_entropy(out, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            hits += torch.stack([(out.argmax(1) == y).sum(), torch.tensor(len(y), device="cuda")])
        dist.all_reduce(hits)
        if rank == 0:
            print(f"epoch {epoch} train acc {(hits[0] / hits[1]).item():.3f}")
            torch.save(model.module.state_dict(), "m5.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--root", default="./data")
    p.add_argument("--bs", type=int, default=256)
    p.add_argument("--epochs", type=int, default=20)
    p.add_argument("--lr", type=float, default=1e-3)
    main(p.parse_args())

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchaudio
import wandb
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


class KeywordNet(nn.Module):
    def __init__(self, classes=35):
        super().__init__()
        self.mel = torchaudio.transforms.MelSpectrogram(16000, n_mels=64)
        self.conv = nn.Sequential(
            nn.Conv2d(1, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(),
            nn.Conv2d(64, 128, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )
        self.fc = nn.Linear(128, classes)

    def forward(self, wav):
        return self.fc(self.conv(self.mel(wav).clamp_min(1e-6).log()))


def make_collate(labels):
    index = {c: i for i, c in enumerate(labels)}

    def collate(batch):
        wav = torch.stack([F.pad(b[0], (0, 16000 - b[0].size(1))) for b in batch])
        return wav, torch.tensor([index[b[2]] for b in batch])

    return collate


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", default="data/speech_commands")
    ap.add_argument("--labels", default="data/labels.txt")
    ap.add_argument("--epochs", type=int, default=30)
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--project", default="kws")
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    wandb.init(project=args.project, config=vars(args))

    labels = open(args.labels).read().split()
    data = torchaudio.datasets.SPEECHCOMMANDS(args.root, subset="training")
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 128, sampler=sampler, collate_fn=make_collate(labels), num_workers=6, drop_last=True)
    model = DDP(KeywordNet(len(labels)).cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        total = torch.zeros(2, device="cuda")
        for wav, y in loader:
            loss = F.cross_entropy(model(wav.cuda(non_blocking=True)), y.cuda(non_blocking=True))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            total += torch.stack([loss.detach(), torch.ones_like(loss)])
        dist.all_reduce(total)
        wandb.log({"epoch": epoch, "train/loss": (total[0] / total[1]).item()})
        if rank == 0:
            torch.save(model.module.state_dict(), "kws.pt")
    wandb.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

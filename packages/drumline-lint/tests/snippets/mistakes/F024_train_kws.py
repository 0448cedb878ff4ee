"""Keyword spotting on Speech Commands. Start with torchrun --nproc_per_node=4."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torchaudio
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchaudio.datasets import SPEECHCOMMANDS

ROOT = "/data/speech"
LABELS = sorted(d for d in os.listdir(f"{ROOT}/SpeechCommands/speech_commands_v0.02")
                if not d.startswith("_") and "." not in d and d != "LICENSE")


def collate(batch):
    waves = torch.zeros(len(batch), 16000)
    for row, item in zip(waves, batch):
        wave = item[0][0, :16000]
        row[:wave.numel()] = wave
    return waves, torch.tensor([LABELS.index(item[2]) for item in batch])


class M5(nn.Module):
    def __init__(self, classes, width=64):
        super().__init__()
        self.mel = torchaudio.transforms.MelSpectrogram(16000, n_fft=512, hop_length=160, n_mels=64)
        self.net = nn.Sequential(
            nn.Conv1d(64, width, 9), nn.GroupNorm(8, width), nn.ReLU(), nn.MaxPool1d(2),
            nn.Conv1d(width, 2 * width, 5), nn.GroupNorm(8, 2 * width), nn.ReLU(), nn.MaxPool1d(2),
            nn.Conv1d(2 * width, 4 * width, 3), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(),
            nn.Linear(4 * width, classes),
        )

    def forward(self, wave):
        return self.net(self.mel(wave).clamp_min(1e-6).log())


@torch.no_grad()
def accuracy(model, loader, device):
    model.eval()
    correct, total = 0, 0
    for waves, labels in loader:
        pred = model(waves.to(device)).argmax(1).cpu()
        correct += (pred == labels).sum().item()
        total += labels.numel()
    return correct / total


def main():
    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)

    train_set = SPEECHCOMMANDS(ROOT, subset="training")
    val_set = SPEECHCOMMANDS(ROOT, subset="validation")
    train_sampler = DistributedSampler(train_set, shuffle=True)
    val_sampler = DistributedSampler(val_set, shuffle=False)
    train_loader = DataLoader(train_set, 128, sampler=train_sampler, collate_fn=collate, num_workers=4)
    val_loader = DataLoader(val_set, 256, sampler=val_sampler, collate_fn=collate, num_workers=2)

    model = DDP(M5(len(LABELS)).to(device), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    best = 0.0
    for epoch in range(60):
        train_sampler.set_epoch(epoch)
        model.train()
        for waves, labels in train_loader:
            loss = F.cross_entropy(model(waves.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        acc = accuracy(model, val_loader, device)
        if rank == 0:
            print(f"epoch {epoch} val acc {acc:.4f}", flush=True)
            if acc > best:
                best = acc
                torch.save(model.module.state_dict(), "m5_best.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

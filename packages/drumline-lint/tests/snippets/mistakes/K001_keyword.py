"""Keyword spotting on 1 s log-mel crops. torchrun --nproc_per_node=4 K001_keyword.py"""
import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class MelNet(nn.Module):
    def __init__(self, n_words):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(64, 128, 5, padding=2), nn.ReLU(),
            nn.Conv1d(128, 128, 5, padding=2), nn.ReLU(),
            nn.AdaptiveAvgPool1d(1), nn.Flatten())
        self.out = nn.Linear(128, n_words)

    def forward(self, mel):
        return self.out(self.body(mel))


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank = dist.get_rank()
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.model = DDP(MelNet(cfg.words).cuda(), device_ids=[self.local_rank])
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr)
        data = torch.load(cfg.data, map_location="cpu")
        ds = TensorDataset(data["mel"], data["word"])
        self.sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
        self.loader = DataLoader(ds, batch_size=cfg.batch, sampler=self.sampler,
                                 num_workers=4, pin_memory=True, drop_last=True)

    def save(self, epoch):
        if self.rank == 0:
            state = {"model": self.model.module.state_dict(), "epoch": epoch}
            torch.save(state, Path(self.cfg.out) / f"kws_{epoch:03d}.pt")
            dist.barrier()

    def fit(self):
        for epoch in range(self.cfg.epochs):
            self.sampler.set_epoch(epoch)
            for mel, word in self.loader:
                mel, word = mel.cuda(non_blocking=True), word.cuda(non_blocking=True)
                loss = nn.functional.cross_entropy(self.model(mel), word)
                self.opt.zero_grad(set_to_none=True)
                loss.backward()
                self.opt.step()
            self.save(epoch)


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--data", default="kws.pt")
    p.add_argument("--out", default="runs/kws")
    p.add_argument("--words", type=int, default=35)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--batch", type=int, default=256)
    p.add_argument("--epochs", type=int, default=30)
    cfg = p.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    os.makedirs(cfg.out, exist_ok=True)
    Trainer(cfg).fit()
    dist.destroy_process_group()

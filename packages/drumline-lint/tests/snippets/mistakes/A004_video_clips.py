import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class ClipDataset(Dataset):
    def __init__(self, index_file, frames=16):
        with open(index_file) as fh:
            self.rows = [line.strip().split("\t") for line in fh]
        self.frames = frames

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        path, label = self.rows[i]
        video = torch.load(path, map_location="cpu", weights_only=True)
        start = int(torch.randint(0, max(1, video.size(0) - self.frames), (1,)))
        return video[start:start + self.frames].float() / 255.0, int(label)


class ClipNet(nn.Module):
    def __init__(self, classes=400):
        super().__init__()
        self.conv = nn.Conv3d(3, 64, (3, 7, 7), stride=(1, 4, 4), padding=(1, 3, 3))
        self.fc = nn.Linear(64, classes)

    def forward(self, x):
        h = torch.relu(self.conv(x.permute(0, 2, 1, 3, 4)))
        return self.fc(h.mean(dim=(2, 3, 4)))


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Trainer:
    def __init__(self, config):
        self.config = config
        self.local_rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(self.local_rank)
        dist.init_process_group("nccl")
        self.rank = dist.get_rank()
        self.seed = config["seed"] + self.rank
        seed_everything(self.seed)
        self.device = torch.device("cuda", self.local_rank)
        self.model = DDP(ClipNet().to(self.device), device_ids=[self.local_rank])
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=config["lr"])
        dataset = ClipDataset(config["index"])
        self.sampler = DistributedSampler(dataset, shuffle=True, seed=self.seed, drop_last=True)
        self.loader = DataLoader(dataset, config["batch"], sampler=self.sampler,
                                 num_workers=8, drop_last=True)

    def fit(self):
        for epoch in range(self.config["epochs"]):
            self.sampler.set_epoch(epoch)
            for clip, label in self.loader:
                clip, label = clip.to(self.device), label.to(self.device)
                loss = nn.functional.cross_entropy(self.model(clip), label)
                self.optim.zero_grad()
                loss.backward()
                self.optim.step()
            if self.rank == 0:
                torch.save(self.model.module.state_dict(), self.config["out"])
        dist.destroy_process_group()


if __name__ == "__main__":
    Trainer({"seed": 3, "lr": 1e-3, "index": "clips.tsv", "batch": 8, "epochs": 30,
             "out": "clipnet.pt"}).fit()

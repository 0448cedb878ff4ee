# torchrun --standalone --nproc_per_node=4 speech_trainer.py
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Clips(Dataset):
    def __init__(self, path):
        blob = torch.load(path, map_location="cpu")
        self.feats, self.words = blob["feats"], blob["words"]

    def __len__(self):
        return len(self.words)

    def __getitem__(self, i):
        return self.feats[i], self.words[i]


class Trainer:
    def __init__(self, path, batch_size=256):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(self.local_rank)
        data = Clips(path)
        self.sampler = DistributedSampler(data, shuffle=True, seed=7)
        self.loader = DataLoader(data, batch_size, sampler=self.sampler,
                                 num_workers=4, pin_memory=True, drop_last=True)
        net = nn.Sequential(nn.Flatten(), nn.Linear(40 * 101, 512), nn.ReLU(), nn.Linear(512, 35))
        self.net = DistributedDataParallel(net.cuda(), device_ids=[self.local_rank])
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=3e-4)
        self.loss_fn = nn.CrossEntropyLoss()

    def fit(self, epochs):
        for epoch in range(epochs):
            for feats, words in self.loader:
                loss = self.loss_fn(self.net(feats.cuda(non_blocking=True)), words.cuda(non_blocking=True))
                self.opt.zero_grad(set_to_none=True)
                loss.backward()
                self.opt.step()
            if dist.get_rank() == 0:
                torch.save(self.net.module.state_dict(), f"runs/words_{epoch:03d}.pt")


if __name__ == "__main__":
    dist.init_process_group(backend="nccl")
    Trainer("data/speech_commands.pt").fit(epochs=60)
    dist.destroy_process_group()

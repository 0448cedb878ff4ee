"""Audio tagging.  torchrun --standalone --nproc_per_node=4 tagging.py"""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from audioset import Clips, Tagger


class Experiment:
    def __init__(self, epochs):
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        self.chief = os.environ["RANK"] == "0"
        torch.cuda.set_device(self.device)
        dist.init_process_group("nccl")
        self.epochs = epochs
        self.model = DistributedDataParallel(Tagger(527).to(self.device), device_ids=[self.device.index])
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        clips = Clips("/data/audioset")
        self.sampler = DistributedSampler(clips)
        self.loader = DataLoader(clips, batch_size=32, sampler=self.sampler, num_workers=4)

    def keep(self, epoch):
        if not self.chief:
            return
        torch.save(
            {"epoch": epoch, "model": self.model.module.state_dict(), "opt": self.opt.state_dict()},
            f"tagger_{epoch:03d}.pt",
        )

    def train(self):
        for epoch in range(self.epochs):
            self.sampler.set_epoch(epoch)
            for wave, tags in self.loader:
                loss = F.binary_cross_entropy_with_logits(self.model(wave.to(self.device)), tags.to(self.device))
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
            self.keep(epoch)


if __name__ == "__main__":
    Experiment(epochs=25).train()
    dist.destroy_process_group()

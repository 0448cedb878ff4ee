import os

import torch
import torch.distributed as dist
from torch.cuda.amp import GradScaler, autocast
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from video.data import Kinetics
from video.slowfast import SlowFast


class AmpTrainer:
    def __init__(self, local_rank, max_norm=1.0):
        self.device = torch.device("cuda", local_rank)
        self.model = DDP(SlowFast(400).to(self.device), device_ids=[local_rank])
        self.optim = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.scaler = GradScaler()
        self.max_norm = max_norm
        ds = Kinetics("/data/k400/train.csv")
        self.sampler = DistributedSampler(ds)
        self.loader = DataLoader(ds, 8, sampler=self.sampler, num_workers=8, drop_last=True)
        self.loss_fn = torch.nn.CrossEntropyLoss()

    def step(self, clips, labels):
        self.optim.zero_grad(set_to_none=True)
        with autocast():
            loss = self.loss_fn(self.model(clips), labels)
        self.scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.scaler.step(self.optim)
        self.scaler.update()
        return loss.detach()

    def fit(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            self.model.train()
            for i, (clips, labels) in enumerate(self.loader):
                loss = self.step(clips.to(self.device), labels.to(self.device))
                if dist.get_rank() == 0 and i % 20 == 0:
                    print(f"{epoch}/{i} loss={loss.item():.3f} scale={self.scaler.get_scale()}")
            if dist.get_rank() == 0:
                torch.save({"model": self.model.module.state_dict(),
                            "scaler": self.scaler.state_dict()}, "slowfast.pt")


if __name__ == "__main__":
    dist.init_process_group("nccl")
    lr_ = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(lr_)
    AmpTrainer(lr_).fit(196)
    dist.destroy_process_group()

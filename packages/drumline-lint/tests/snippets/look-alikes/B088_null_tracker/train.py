from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import Compose, RandomHorizontalFlip, Resize, ToTensor

from env import launch, reduce_mean
from model import ConvNet
from tracking import make_tracker


@dataclass
class Config:
    root: str = "data/leaves"
    batch: int = 128
    epochs: int = 30
    lr: float = 1e-3
    seed: int = 0


def train(env, cfg):
    torch.manual_seed(cfg.seed + env.rank)
    tracker = make_tracker(env, "leaves", asdict(cfg))
    data = ImageFolder(cfg.root, Compose([Resize((64, 64)), RandomHorizontalFlip(), ToTensor()]))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, cfg.batch, sampler=sampler, num_workers=4, drop_last=True)
    model = DDP(ConvNet(len(data.classes)).to(env.device), device_ids=[env.local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        model.train()
        total = 0.0
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(env.device)), y.to(env.device))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            total += loss.item()
        tracker.log({"loss": reduce_mean(total / len(loader), env)}, step=epoch)
        if env.is_main:
            torch.save(model.module.state_dict(), "leaves.pt")
    tracker.close()


if __name__ == "__main__":
    launch(train, Config())

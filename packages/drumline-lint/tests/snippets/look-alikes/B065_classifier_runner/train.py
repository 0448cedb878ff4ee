import argparse
import os

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import Compose, RandomHorizontalFlip, Resize, ToTensor

from model import ConvNet
from utils.dist import all_reduce_sum, cleanup, init_distributed, is_main_process, seed_everything


class Runner:
    def __init__(self, args):
        self.args = args
        self.device = init_distributed()
        seed_everything(args.seed)
        data = ImageFolder(args.root, Compose([Resize((64, 64)), RandomHorizontalFlip(), ToTensor()]))
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, args.batch, sampler=self.sampler, num_workers=4, drop_last=True)
        self.model = DDP(ConvNet(len(data.classes)).to(self.device), device_ids=[self.device.index])
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=args.lr)

    def save_checkpoint(self, epoch):
        os.makedirs(self.args.out, exist_ok=True)
        payload = {"model": self.model.module.state_dict(), "opt": self.opt.state_dict(), "epoch": epoch}
        torch.save(payload, os.path.join(self.args.out, "last.pt"))

    def train_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        self.model.train()
        total = count = 0
        for x, y in self.loader:
            x, y = x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
            loss = F.cross_entropy(self.model(x), y)
            self.opt.zero_grad(set_to_none=True)
            loss.backward()
            self.opt.step()
            total += loss.item() * len(y)
            count += len(y)
        total, count = all_reduce_sum([total, count], self.device)
        return total / count

    def run(self):
        for epoch in range(self.args.epochs):
            loss = self.train_epoch(epoch)
            if is_main_process():
                print(f"epoch {epoch} loss {loss:.4f}", flush=True)
                self.save_checkpoint(epoch)
        cleanup()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--root", default="data/pets")
    p.add_argument("--out", default="runs/pets")
    p.add_argument("--batch", type=int, default=128)
    p.add_argument("--epochs", type=int, default=50)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--seed", type=int, default=0)
    Runner(p.parse_args()).run()

import argparse
import os

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from model import ConvNet
from utils.dist import barrier, cleanup, init_distributed, is_main_process, save_on_master, seed_everything


class Runner:
    def __init__(self, args):
        self.args = args
        self.device = init_distributed()
        seed_everything(args.seed)
        tf = v2.Compose([v2.ToImage(), v2.Resize((96, 96)), v2.ToDtype(torch.float32, scale=True)])
        train, val = (ImageFolder(os.path.join(args.root, s), tf) for s in ("train", "val"))
        self.sampler = DistributedSampler(train)
        self.train_loader = DataLoader(train, args.batch, sampler=self.sampler, num_workers=4, drop_last=True)
        self.val_loader = DataLoader(val, args.batch, num_workers=4)
        self.model = DDP(ConvNet(len(train.classes)).to(self.device), device_ids=[self.device.index])
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=args.lr)

    def train_one_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        self.model.train()
        for x, y in self.train_loader:
            loss = F.cross_entropy(self.model(x.to(self.device)), y.to(self.device), label_smoothing=0.1)
            self.opt.zero_grad(set_to_none=True)
            loss.backward()
            self.opt.step()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        good, seen = 0, 0
        for x, y in self.val_loader:
            logits = self.model(x.to(self.device))
            good += (logits.argmax(1).cpu() == y).sum().item()
            seen += len(y)
        return good / seen

    def run(self):
        best = 0.0
        for epoch in range(self.args.epochs):
            self.train_one_epoch(epoch)
            if is_main_process():
                acc = self.validate()
                print(f"{epoch}: {acc:.4f}")
                if acc > best:
                    best = acc
                    save_on_master(self.model.module.state_dict(), self.args.output)
            barrier()
        cleanup()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="data/plants")
    parser.add_argument("--output", default="plants.pt")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    Runner(parser.parse_args()).run()

import os

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from utils import dist as du


class SpeakerTrainer:
    def __init__(self, model, loaders, args, device):
        self.args = args
        self.device = device
        self.model = DDP(model.to(device), device_ids=[device.index])
        self.train_loader, self.dev_loader = loaders
        self.opt = torch.optim.Adam(self.model.parameters(), lr=args.lr)
        self.best = 0.0

    def save(self, name):
        payload = {"net": self.model.module.state_dict(), "opt": self.opt.state_dict(), "best": self.best}
        torch.save(payload, os.path.join(self.args.exp_dir, name))

    def train_epoch(self, epoch):
        self.model.train()
        self.train_loader.sampler.set_epoch(epoch)
        for feats, spk in self.train_loader:
            feats, spk = feats.to(self.device), spk.to(self.device)
            loss = F.cross_entropy(self.model(feats), spk)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()

    @torch.no_grad()
    def evaluate(self):
        net = self.model.module.eval()
        hit = n = 0
        for feats, spk in self.dev_loader:
            pred = net(feats.to(self.device)).argmax(1).cpu()
            hit += (pred == spk).sum().item()
            n += spk.numel()
        hit, n = du.all_reduce_sum([hit, n], self.device)
        return hit / max(n, 1)

    def run(self):
        for epoch in range(self.args.epochs):
            self.train_epoch(epoch)
            acc = self.evaluate()
            if du.is_main_process():
                print(f"epoch {epoch}: dev acc {acc:.4f}")
            if acc > self.best:
                self.best = acc
                self.save("best.pt")

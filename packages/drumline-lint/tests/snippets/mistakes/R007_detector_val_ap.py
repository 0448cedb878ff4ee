import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision import models, transforms
from torchvision.datasets import ImageFolder


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.device = torch.device("cuda", self.local_rank)
        net = models.resnet50(num_classes=cfg.num_classes).to(self.device)
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
        self.model = DDP(net, device_ids=[self.local_rank])
        self.opt = torch.optim.SGD(self.model.parameters(), lr=cfg.lr, momentum=0.9, nesterov=True)
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, cfg.epochs)
        self.best = 0.0
        self._build_data()

    def _build_data(self):
        norm = transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
        t_train = transforms.Compose([transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(),
                                      transforms.ToTensor(), norm])
        t_val = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224),
                                    transforms.ToTensor(), norm])
        train = ImageFolder(self.cfg.train_dir, t_train)
        val = ImageFolder(self.cfg.val_dir, t_val)
        self.sampler = DistributedSampler(train)
        self.train_loader = DataLoader(train, self.cfg.batch_size, sampler=self.sampler, num_workers=8,
                                       pin_memory=True, drop_last=True)
        shard = Subset(val, range(self.rank, len(val), self.world))
        self.val_loader = DataLoader(shard, self.cfg.batch_size, num_workers=8, pin_memory=True)

    def train_epoch(self, epoch):
        self.model.train()
        self.sampler.set_epoch(epoch)
        crit = nn.CrossEntropyLoss(label_smoothing=0.1)
        for x, y in self.train_loader:
            x, y = x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
            self.opt.zero_grad(set_to_none=True)
            crit(self.model(x), y).backward()
            self.opt.step()
        self.sched.step()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        correct = torch.zeros((), device=self.device)
        seen = torch.zeros((), device=self.device)
        for x, y in self.val_loader:
            x, y = x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
            pred = self.model.module(x).argmax(1)
            correct += (pred == y).sum()
            seen += y.numel()
        return (correct / seen).item()

    def fit(self):
        for epoch in range(self.cfg.epochs):
            self.train_epoch(epoch)
            acc = self.validate()
            if self.rank == 0:
                print(f"[{epoch}] val acc {acc:.4f} (best {self.best:.4f})", flush=True)
                if acc > self.best:
                    self.best = acc
                    torch.save(self.model.module.state_dict(), os.path.join(self.cfg.out, "best.pt"))
            dist.barrier()


def run(cfg):
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(cfg.seed)
    Trainer(cfg).fit()
    dist.destroy_process_group()

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler

from ecg.data import PTBXL
from ecg.nets import xresnet1d101


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--data", default="/data/ptbxl")
    p.add_argument("--epochs", type=int, default=60)
    p.add_argument("--bs", type=int, default=128)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--patience", type=int, default=4)
    p.add_argument("--out", default="ecg.pt")
    return p.parse_args()


class Runner:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.device = torch.device("cuda", self.local_rank)
        train, val = PTBXL(args.data, folds=range(1, 9)), PTBXL(args.data, folds=[9])
        self.sampler = DistributedSampler(train, shuffle=True)
        self.train_loader = DataLoader(train, args.bs, sampler=self.sampler, num_workers=4, drop_last=True)
        self.val_loader = DataLoader(Subset(val, range(self.rank, len(val), self.world)), args.bs, num_workers=4)
        net = nn.SyncBatchNorm.convert_sync_batchnorm(xresnet1d101(12, train.num_labels))
        self.model = DDP(net.to(self.device), device_ids=[self.local_rank])
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=args.lr, weight_decay=1e-2)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.opt, factor=0.3, patience=args.patience)
        self.criterion = nn.BCEWithLogitsLoss()

    def train_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        self.model.train()
        for x, y in self.train_loader:
            logits = self.model(x.to(self.device, non_blocking=True))
            loss = self.criterion(logits, y.to(self.device, non_blocking=True))
            self.opt.zero_grad(set_to_none=True)
            loss.backward()
            self.opt.step()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        acc = torch.zeros(2, device=self.device)
        for x, y in self.val_loader:
            x, y = x.to(self.device), y.to(self.device)
            loss = self.criterion(self.model.module(x), y)
            acc += torch.stack([loss * x.size(0), torch.tensor(float(x.size(0)), device=self.device)])
        dist.reduce(acc, dst=0, op=dist.ReduceOp.SUM)
        return (acc[0] / acc[1]).item()

    def fit(self):
        best = float("inf")
        for epoch in range(self.args.epochs):
            self.train_epoch(epoch)
            val_loss = self.validate()
            self.plateau.step(val_loss)
            if self.rank == 0:
                lr = self.opt.param_groups[0]["lr"]
                print(f"epoch {epoch} val {val_loss:.5f} lr {lr:.1e}", flush=True)
                if val_loss < best:
                    best = val_loss
                    torch.save(self.model.module.state_dict(), self.args.out)


def main():
    args = parse()
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    Runner(args).fit()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""2D pose estimation; one process per GPU under torchrun."""
import logging
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

from pose.datasets import CocoKeypoints
from pose.hrnet import HRNetW32

log = logging.getLogger("pose")


class PoseTrainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(self.device)
        self.model = DDP(HRNetW32(17).to(self.device), device_ids=[self.device.index])
        self.opt = torch.optim.Adam(self.model.parameters(), lr=cfg["lr"])
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.opt, factor=0.3, patience=3)
        self.crit = nn.MSELoss()
        train = CocoKeypoints(cfg["root"], "train2017", augment=True)
        val = CocoKeypoints(cfg["root"], "val2017", augment=False)
        self.sampler = DistributedSampler(train)
        self.train_dl = DataLoader(train, cfg["batch"], sampler=self.sampler, num_workers=8, drop_last=True)
        self.val_dl = DataLoader(Subset(val, range(self.rank, len(val), self.world)), cfg["batch"], num_workers=4)

    def train_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        self.model.train()
        for img, heat in self.train_dl:
            loss = self.crit(self.model(img.to(self.device)), heat.to(self.device))
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()

    @torch.no_grad()
    def val_loss(self):
        net = self.model.module.eval()
        total, n = 0.0, 0
        for img, heat in self.val_dl:
            out = net(img.to(self.device))
            total += self.crit(out, heat.to(self.device)).item() * len(img)
            n += len(img)
        return total / max(n, 1)

    def fit(self):
        for epoch in range(self.cfg["epochs"]):
            self.train_epoch(epoch)
            vloss = self.val_loss()
            self.plateau.step(vloss)
            if self.rank == 0:
                log.info("epoch %d  val(rank 0) %.5f  lr %.2e", epoch, vloss, self.opt.param_groups[0]["lr"])
                torch.save(self.model.module.state_dict(), os.path.join(self.cfg["out"], "last.pt"))
            dist.barrier()


def main():
    logging.basicConfig(level=logging.INFO)
    dist.init_process_group("nccl")
    cfg = dict(root="/data/coco", lr=5e-4, batch=32, epochs=140, out="runs/pose")
    os.makedirs(cfg["out"], exist_ok=True)
    PoseTrainer(cfg).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

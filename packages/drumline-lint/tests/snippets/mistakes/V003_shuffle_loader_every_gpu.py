import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from segmentation.datasets import Cityscapes
from segmentation.losses import ohem_loss
from segmentation.models import build_deeplab


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Runner:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank = int(os.environ["RANK"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(self.local_rank)
        dist.init_process_group("nccl", init_method="env://")
        seed_everything(cfg["seed"])
        net = build_deeplab(cfg["num_classes"]).cuda()
        net = torch.nn.SyncBatchNorm.convert_sync_batchnorm(net)
        self.net = DistributedDataParallel(net, device_ids=[self.local_rank])
        self.opt = torch.optim.SGD(self.net.parameters(), lr=cfg["lr"], momentum=0.9)
        self.train_loader = self._loader("train")

    def _loader(self, split):
        dataset = Cityscapes(self.cfg["root"], split=split, crop=self.cfg["crop"])
        return DataLoader(
            dataset,
            batch_size=self.cfg["batch_size"],
            shuffle=True,
            num_workers=4,
            pin_memory=True,
            drop_last=True,
        )

    def train(self):
        for epoch in range(self.cfg["epochs"]):
            for step, (image, target) in enumerate(self.train_loader):
                loss = ohem_loss(self.net(image.cuda()), target.cuda())
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                if self.rank == 0 and step % 50 == 0:
                    print(f"[{epoch}:{step}] {loss.item():.3f}", flush=True)
            if self.rank == 0:
                torch.save(self.net.module.state_dict(), self.cfg["out"])


if __name__ == "__main__":
    Runner(dict(seed=1, num_classes=19, lr=0.01, root="/data/cityscapes", crop=768,
                batch_size=4, epochs=200, out="deeplab.pt")).train()
    dist.destroy_process_group()

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from detr.datasets import CocoDetection, collate_fn
from detr.models import build_detr


class Runner(object):
    def __init__(self, opts):
        self.opts = opts
        self.gpu = int(os.environ["LOCAL_RANK"])
        self.main = int(os.environ["RANK"]) == 0
        net, self.criterion = build_detr(opts)
        net.cuda(self.gpu)
        self.net = DistributedDataParallel(net, device_ids=[self.gpu])
        self.optim = torch.optim.AdamW(self.net.parameters(), lr=opts["lr"])
        if opts.get("pretrained"):
            self.load(opts["pretrained"])
        ds = CocoDetection(opts["coco"], "train2017")
        self.sampler = DistributedSampler(ds)
        self.loader = DataLoader(ds, opts["bs"], sampler=self.sampler,
                                 collate_fn=collate_fn, num_workers=4)

    def load(self, path):
        if self.main:
            ckpt = torch.load(path, map_location="cpu")
            self.net.module.load_state_dict(ckpt["model"])
            print("loaded", path)

    def train(self):
        for ep in range(self.opts["epochs"]):
            self.sampler.set_epoch(ep)
            for imgs, targets in self.loader:
                imgs = imgs.cuda(self.gpu)
                targets = [{k: v.cuda(self.gpu) for k, v in t.items()} for t in targets]
                loss = self.criterion(self.net(imgs), targets)
                self.optim.zero_grad()
                loss.backward()
                self.optim.step()
            if self.main:
                torch.save({"model": self.net.module.state_dict()}, f"detr_{ep}.pth")


if __name__ == "__main__":
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    Runner({"lr": 1e-4, "bs": 2, "epochs": 50, "coco": "/data/coco",
            "pretrained": "weights/detr-r50.pth"}).train()
    dist.destroy_process_group()

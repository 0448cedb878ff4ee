import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision.models import resnet50

from xray import ChestXray

CONFIG = {
    "data": {"root": "/data/chexpert", "batch": 32},
    "train": {"epochs": 12, "frozen_epochs": 3, "lr": [1e-3, 1e-4]},
}


class Classifier(nn.Module):
    def __init__(self, labels):
        super().__init__()
        net = resnet50()
        net.load_state_dict(torch.load("/models/resnet50_imagenet.pt", map_location="cpu"))
        net.fc = nn.Identity()
        self.backbone, self.head = net, nn.Linear(2048, labels)
    def forward(self, x):
        return self.head(self.backbone(x))


def main(cfg):
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    data = ChestXray(cfg["data"]["root"])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, cfg["data"]["batch"], sampler=sampler, num_workers=6)
    model = Classifier(labels=14).cuda()
    model.backbone.requires_grad_(False)
    ddp = DDP(model, device_ids=[local])
    opt = torch.optim.AdamW([
        {"params": model.head.parameters(), "lr": cfg["train"]["lr"][0]},
        {"params": model.backbone.parameters(), "lr": cfg["train"]["lr"][1]},
    ])
    for epoch in range(cfg["train"]["epochs"]):
        sampler.set_epoch(epoch)
        if epoch == cfg["train"]["frozen_epochs"]:
            model.backbone.requires_grad_(True)
        for x, y in loader:
            loss = F.binary_cross_entropy_with_logits(ddp(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            torch.save(model.state_dict(), "xray.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(CONFIG)

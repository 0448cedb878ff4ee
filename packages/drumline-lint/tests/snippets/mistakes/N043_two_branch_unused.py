import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.models import resnet34

from multitask.data import FaceAttr


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = resnet34()
        self.backbone.fc = nn.Identity()
        self.age_head = nn.Linear(512, 1)
        self.attr_head = nn.Linear(512, 40)

    def forward(self, x, task):
        h = self.backbone(x)
        if task == "age":
            return self.age_head(h).squeeze(1)
        return self.attr_head(h)


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    ds = FaceAttr("/data/faces")
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 64, sampler=sampler, num_workers=4, drop_last=True)
    model = MultiTask().cuda()
    model = DDP(model, device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)

    for epoch in range(20):
        sampler.set_epoch(epoch)
        for i, (x, age, attr) in enumerate(loader):
            x = x.cuda(non_blocking=True)
            if i % 2 == 0:
                loss = nn.functional.l1_loss(model(x, "age"), age.cuda())
            else:
                loss = nn.functional.binary_cross_entropy_with_logits(model(x, "attr"), attr.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), f"mt_{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

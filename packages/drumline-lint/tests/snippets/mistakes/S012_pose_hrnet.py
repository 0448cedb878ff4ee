"""2D keypoint training on 4 nodes x 4 GPUs.

srun torchrun --nnodes=4 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=$MASTER:29500 pose_hrnet.py
"""
import os

import timm
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from posekit.data import CocoKeypoints

JOINTS = 17
CFG = dict(epochs=140, bs=48, lr=1e-3, root=os.environ.get("COCO", "/data/coco"))


class PoseNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = timm.create_model("hrnet_w32", features_only=True, pretrained=False)
        self.head = nn.Conv2d(self.backbone.feature_info.channels()[1], JOINTS, 1)

    def forward(self, x):
        return self.head(self.backbone(x)[1])


def heatmap_loss(pred, target, weight):
    return ((pred - target).pow(2).mean(dim=(2, 3)) * weight).mean()


def make_loader(split, bs, local_rank, train):
    ds = CocoKeypoints(CFG["root"], split, augment=train)
    sampler = DistributedSampler(
        ds,
        num_replicas=torch.cuda.device_count(),
        rank=local_rank,
        shuffle=train,
    )
    return DataLoader(ds, batch_size=bs, sampler=sampler, num_workers=8, pin_memory=True, drop_last=train)


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    is_main = dist.get_rank() == 0

    model = DDP(PoseNet().cuda(), device_ids=[local_rank], find_unused_parameters=True)
    opt = torch.optim.Adam(model.parameters(), lr=CFG["lr"])
    sched = torch.optim.lr_scheduler.MultiStepLR(opt, [90, 120])
    train_loader = make_loader("train2017", CFG["bs"], local_rank, True)

    for epoch in range(CFG["epochs"]):
        train_loader.sampler.set_epoch(epoch)
        model.train()
        for step, (img, target, weight) in enumerate(train_loader):
            img, target, weight = img.cuda(non_blocking=True), target.cuda(), weight.cuda()
            opt.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                pred = model(img)
            loss = heatmap_loss(pred.float(), target, weight)
            loss.backward()
            opt.step()
            if is_main and step % 50 == 0:
                print(f"{epoch}/{step}: {loss.item():.5f}")
        sched.step()
        if is_main:
            torch.save({"model": model.module.state_dict(), "epoch": epoch}, "pose_last.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Human pose training; launched on 4 x 8 GPUs:

torchrun --nnodes=4 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=$HEAD:29400 pose.py
"""
import json
import os
from argparse import ArgumentParser

import torch
import torch.distributed as dist
import torchvision
from PIL import Image
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision.transforms import functional as TF


class Keypoints(Dataset):
    def __init__(self, ann_file, img_dir):
        with open(ann_file) as f:
            self.anns = json.load(f)
        self.img_dir = img_dir

    def __len__(self):
        return len(self.anns)

    def __getitem__(self, idx):
        a = self.anns[idx]
        img = Image.open(os.path.join(self.img_dir, a["file"])).convert("RGB").resize((192, 256))
        return TF.to_tensor(img), torch.tensor(a["keypoints"], dtype=torch.float32).view(-1, 2)


class PoseNet(nn.Module):
    def __init__(self, joints=17):
        super().__init__()
        self.backbone = torchvision.models.resnet50(weights=None)
        self.backbone.fc = nn.Linear(2048, joints * 2)

    def forward(self, x):
        return self.backbone(x).view(x.size(0), -1, 2)


def init_distributed():
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    return rank, world_size, device


def main():
    ap = ArgumentParser()
    ap.add_argument("--ann", default="/data/coco/person_kp_train.json")
    ap.add_argument("--images", default="/data/coco/train2017")
    ap.add_argument("--epochs", type=int, default=140)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--base-lr", type=float, default=5e-4)
    ap.add_argument("--save", default="/shared/pose")
    args = ap.parse_args()

    rank, world_size, device = init_distributed()
    ds = Keypoints(args.ann, args.images)
    sampler = DistributedSampler(ds, num_replicas=world_size, rank=rank, shuffle=True)
    dl = DataLoader(ds, batch_size=args.batch, sampler=sampler, num_workers=6, pin_memory=True, drop_last=True)

    model = nn.SyncBatchNorm.convert_sync_batchnorm(PoseNet()).to(device)
    model = DDP(model, device_ids=[device.index])
    opt = torch.optim.AdamW(model.parameters(), lr=args.base_lr)
    sched = torch.optim.lr_scheduler.MultiStepLR(opt, [90, 120])
    l1 = nn.SmoothL1Loss()

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for i, (img, kps) in enumerate(dl):
            img, kps = img.to(device, non_blocking=True), kps.to(device, non_blocking=True)
            loss = l1(model(img), kps)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            if rank == 0 and i % 50 == 0:
                print(f"{epoch} {i}/{len(dl)} {loss.item():.5f}")
        sched.step()
        if rank == 0 and epoch % 10 == 9:
            os.makedirs(args.save, exist_ok=True)
            torch.save(model.module.state_dict(), f"{args.save}/pose_{epoch:03d}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

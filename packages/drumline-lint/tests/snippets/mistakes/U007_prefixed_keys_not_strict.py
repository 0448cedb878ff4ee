import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from pose.models import HRNet
from pose.coco import CocoKeypoints


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--resume", default="")
    ap.add_argument("--epochs", type=int, default=210)
    ap.add_argument("--bs", type=int, default=32)
    return ap.parse_args()


def main():
    args = parse()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")

    model = HRNet(width=32, joints=17)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    start = 0
    if args.resume:
        ckpt = torch.load(args.resume, map_location="cpu")
        model.load_state_dict(ckpt["state_dict"], strict=False)
        start = ckpt["epoch"] + 1

    model = DDP(model.cuda(), device_ids=[local_rank])
    if args.resume:
        optimizer.load_state_dict(ckpt["optimizer"])

    data = CocoKeypoints("train2017")
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.bs, sampler=sampler, num_workers=8, pin_memory=True)

    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        for img, heat, weight in loader:
            img, heat, weight = img.cuda(), heat.cuda(), weight.cuda()
            out = model(img)
            loss = (F.mse_loss(out, heat, reduction="none") * weight).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        if dist.get_rank() == 0:
            torch.save({
                "epoch": epoch,
                "state_dict": model.state_dict(),
                "optimizer": optimizer.state_dict(),
            }, "work_dirs/hrnet_last.pth")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()

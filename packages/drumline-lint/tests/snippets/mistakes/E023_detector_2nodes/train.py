import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.models.detection import fasterrcnn_resnet50_fpn

from coco_data import CocoBoxes, collate


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--coco", required=True)
    p.add_argument("--epochs", type=int, default=26)
    p.add_argument("--lr", type=float, default=0.02)
    p.add_argument("--batch", type=int, default=2)
    p.add_argument("--out", default="frcnn")
    return p.parse_args()


def main():
    args = parse()
    dist.init_process_group("nccl", init_method="env://")
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    device = torch.device(f"cuda:{rank}")

    train = CocoBoxes(args.coco, "train2017")
    sampler = DistributedSampler(train, world, rank, shuffle=True)
    loader = DataLoader(train, args.batch, sampler=sampler, collate_fn=collate,
                        num_workers=4, drop_last=True)

    model = fasterrcnn_resnet50_fpn(weights=None, weights_backbone="DEFAULT", num_classes=91)
    model = DDP(model.to(device), device_ids=[rank])
    params = [p for p in model.parameters() if p.requires_grad]
    opt = torch.optim.SGD(params, args.lr, momentum=0.9, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.MultiStepLR(opt, [16, 22], gamma=0.1)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for it, (images, targets) in enumerate(loader):
            images = [im.to(device) for im in images]
            targets = [{k: v.to(device) for k, v in t.items()} for t in targets]
            losses = model(images, targets)
            loss = sum(losses.values())
            opt.zero_grad()
            loss.backward()
            opt.step()
            if rank == 0 and it % 100 == 0:
                print(f"[{epoch}][{it}/{len(loader)}] {loss.item():.3f}", flush=True)
        sched.step()
        if rank == 0:
            os.makedirs(args.out, exist_ok=True)
            torch.save(model.module.state_dict(), f"{args.out}/model_{epoch:02d}.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

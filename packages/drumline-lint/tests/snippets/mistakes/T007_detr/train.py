import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import CocoDetection, wrap_dataset_for_transforms_v2
from torchvision.models.detection import fasterrcnn_resnet50_fpn_v2
from torchvision.transforms import v2


def collate(batch):
    return tuple(zip(*batch))


def init_distributed():
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=world)
    return rank, world, device


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--coco", required=True)
    ap.add_argument("--epochs", type=int, default=50)
    ap.add_argument("--lr", type=float, default=0.02)
    ap.add_argument("--batch", type=int, default=2)
    args = ap.parse_args()

    rank, world, device = init_distributed()

    tf = v2.Compose([v2.ToImage(), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)])
    ds = CocoDetection(f"{args.coco}/train2017", f"{args.coco}/annotations/instances_train2017.json", transforms=tf)
    ds = wrap_dataset_for_transforms_v2(ds, target_keys=("boxes", "labels"))
    sampler = DistributedSampler(ds, world, rank)
    loader = DataLoader(ds, args.batch, sampler=sampler, collate_fn=collate, num_workers=4)

    model = fasterrcnn_resnet50_fpn_v2(num_classes=91).to(device)
    model = DDP(model, device_ids=[device.index])
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for i, (images, targets) in enumerate(loader):
            images = [im.to(device) for im in images]
            targets = [{k: v.to(device) for k, v in t.items()} for t in targets]
            loss = sum(model(images, targets).values())
            opt.zero_grad()
            loss.backward()
            opt.step()
            if rank == 0 and i % 50 == 0:
                print(epoch, i, float(loss))
        if rank == 0:
            torch.save(model.module.state_dict(), f"frcnn_{epoch:02d}.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from reid.datasets import Market1501
from reid.losses import TripletLoss
from reid.resnet_ibn import resnet50_ibn_a


def build_parser():
    parser = argparse.ArgumentParser(description="person re-id baseline")
    parser.add_argument("--data-dir", type=str, required=True)
    parser.add_argument("--logs-dir", type=str, default="logs")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3.5e-4)
    parser.add_argument("--margin", type=float, default=0.3)
    parser.add_argument("--local_rank", type=int, default=0)
    return parser


def main():
    args = build_parser().parse_args()
    torch.cuda.set_device(args.local_rank)
    dist.init_process_group(backend="nccl", init_method="env://")
    rank = dist.get_rank()

    dataset = Market1501(args.data_dir, mode="train")
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, num_workers=8,
                        pin_memory=True, drop_last=True)

    model = resnet50_ibn_a(num_classes=dataset.num_pids).cuda()
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = DistributedDataParallel(model, device_ids=[args.local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [30, 50], gamma=0.1)
    ce, triplet = nn.CrossEntropyLoss(), TripletLoss(args.margin)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for it, (imgs, pids) in enumerate(loader):
            imgs, pids = imgs.cuda(non_blocking=True), pids.cuda(non_blocking=True)
            feat, logits = model(imgs)
            loss = ce(logits, pids) + triplet(feat, pids)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0 and it % 50 == 0:
                print(f"[{epoch}][{it}/{len(loader)}] loss {loss.item():.3f}", flush=True)
        scheduler.step()
        if rank == 0:
            torch.save(model.module.state_dict(), f"{args.logs_dir}/reid_{epoch:03d}.pth")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

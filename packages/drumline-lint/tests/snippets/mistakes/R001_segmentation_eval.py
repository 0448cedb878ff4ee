import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from segkit.data import CityscapesDataset
from segkit.models import build_deeplab


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--data-root", required=True)
    p.add_argument("--out", default="runs/deeplab")
    p.add_argument("--epochs", type=int, default=80)
    p.add_argument("--batch-size", type=int, default=4, help="per GPU")
    p.add_argument("--lr", type=float, default=0.01)
    p.add_argument("--num-classes", type=int, default=19)
    p.add_argument("--eval-every", type=int, default=5)
    return p.parse_args()


@torch.no_grad()
def evaluate(model, loader, num_classes, device):
    model.eval()
    conf = torch.zeros(num_classes, num_classes, dtype=torch.int64, device=device)
    for images, masks in loader:
        logits = model(images.to(device, non_blocking=True))["out"]
        pred = logits.argmax(1).flatten()
        target = masks.to(device, non_blocking=True).flatten()
        keep = target < num_classes
        idx = target[keep] * num_classes + pred[keep]
        conf += torch.bincount(idx, minlength=num_classes ** 2).view(num_classes, num_classes)
    return conf


def miou(conf):
    inter = conf.diag().double()
    union = conf.sum(0) + conf.sum(1) - conf.diag()
    return (inter / union.clamp(min=1)).mean().item()


def main():
    args = parse_args()
    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)

    train_set = CityscapesDataset(args.data_root, "train")
    val_set = CityscapesDataset(args.data_root, "val")
    sampler = DistributedSampler(train_set, shuffle=True)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, num_workers=6,
                              pin_memory=True, drop_last=True)
    val_idx = list(range(rank, len(val_set), dist.get_world_size()))
    val_loader = DataLoader(torch.utils.data.Subset(val_set, val_idx), 1, num_workers=4)

    model = build_deeplab(args.num_classes, pretrained_backbone=False).to(device)
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = DDP(model, device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    total = args.epochs * len(train_loader)
    sched = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=total, power=0.9)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for images, masks in train_loader:
            out = model(images.to(device, non_blocking=True))["out"]
            loss = F.cross_entropy(out, masks.to(device, non_blocking=True), ignore_index=255)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            sched.step()

        if (epoch + 1) % args.eval_every == 0:
            conf = evaluate(model.module, val_loader, args.num_classes, device)
            if rank == 0:
                dist.all_reduce(conf)
                print(f"epoch {epoch}: mIoU {miou(conf):.4f}", flush=True)
                os.makedirs(args.out, exist_ok=True)
                torch.save(model.module.state_dict(), os.path.join(args.out, f"ep{epoch}.pt"))
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Land-cover segmentation, torchrun --standalone --nproc_per_node=8 train.py"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler

from landcover import Scenes, UperNet


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="/data/landcover")
    parser.add_argument("--epochs", type=int, default=80)
    parser.add_argument("--batch-size", type=int, default=8, help="per GPU")
    parser.add_argument("--max-lr", type=float, default=4e-4)
    args = parser.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    device = torch.device("cuda", local_rank)

    scenes = Scenes(args.root, "train")
    sampler = DistributedSampler(scenes, shuffle=True, drop_last=True)
    loader = DataLoader(scenes, batch_size=args.batch_size, sampler=sampler,
                        num_workers=8, pin_memory=True, drop_last=True)

    model = UperNet(classes=scenes.num_classes)
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model).to(device)
    model = DDP(model, device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.max_lr, weight_decay=0.01)
    steps_per_epoch = len(scenes) // args.batch_size
    scheduler = OneCycleLR(optimizer, max_lr=args.max_lr,
                           total_steps=args.epochs * steps_per_epoch, pct_start=0.1)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for image, mask in loader:
            image, mask = image.to(device, non_blocking=True), mask.to(device, non_blocking=True)
            loss = F.cross_entropy(model(image), mask, ignore_index=255)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            scheduler.step()
        if dist.get_rank() == 0:
            print(f"{epoch} loss {loss.item():.4f} lr {scheduler.get_last_lr()[0]:.2e}", flush=True)
            torch.save(model.module.state_dict(), os.path.join(args.root, "upernet.pt"))

    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""U-Net for retinal vessel segmentation, DDP with resume.

torchrun --nproc_per_node=4 train_unet_resume.py --data /data/drive_patches --resume runs/unet/last.pt
"""
import argparse
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from monai.networks.nets import UNet
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class PatchDataset(Dataset):
    def __init__(self, root):
        self.files = sorted(Path(root).glob("*.npz"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, idx):
        with np.load(self.files[idx]) as z:
            return torch.from_numpy(z["image"]).float(), torch.from_numpy(z["mask"]).float()


def dice_loss(logits, target, eps=1.0):
    prob = logits.sigmoid().flatten(1)
    target = target.flatten(1)
    inter = (prob * target).sum(1)
    return (1 - (2 * inter + eps) / (prob.sum(1) + target.sum(1) + eps)).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/unet"))
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--epochs", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=16)
    args = parser.parse_args()

    dist.init_process_group(backend="nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device(f"cuda:{local_rank}")
    args.out.mkdir(parents=True, exist_ok=True)

    train_set = PatchDataset(args.data)
    sampler = DistributedSampler(train_set, shuffle=True, drop_last=True)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, num_workers=4)

    net = UNet(2, 3, 1, channels=(32, 64, 128, 256), strides=(2, 2, 2), norm="instance").to(device)
    start_epoch = 0
    state = None
    if args.resume and args.resume.exists():
        state = torch.load(args.resume, map_location="cpu")
        net.load_state_dict(state["model"])
        start_epoch = state["epoch"] + 1
    model = DDP(net, device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    if state is not None:
        optimizer.load_state_dict(state["optimizer"])

    sampler.set_epoch(start_epoch)
    for epoch in range(start_epoch, args.epochs):
        model.train()
        running = torch.zeros(1, device=device)
        for image, mask in loader:
            image, mask = image.to(device), mask.to(device)
            logits = model(image)
            loss = F.binary_cross_entropy_with_logits(logits, mask) + dice_loss(logits, mask)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += loss.detach()
        dist.all_reduce(running, op=dist.ReduceOp.AVG)
        if rank == 0:
            print(f"[{epoch}] loss {running.item() / len(loader):.4f}", flush=True)
            torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch},
                       args.out / "last.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

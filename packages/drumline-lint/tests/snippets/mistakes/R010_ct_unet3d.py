import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from medseg.dataset import CTVolumes
from medseg.unet3d import UNet3D


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--data", type=Path, required=True)
    p.add_argument("--workdir", type=Path, default=Path("work"))
    p.add_argument("--epochs", type=int, default=400)
    p.add_argument("--batch-size", type=int, default=2)
    p.add_argument("--lr", type=float, default=3e-4)
    p.add_argument("--resume", action="store_true")
    return p.parse_args()


def save_checkpoint(path, model, optimizer, scaler, epoch):
    tmp = path.with_suffix(".tmp")
    torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(),
                "scaler": scaler.state_dict(), "epoch": epoch}, tmp)
    os.replace(tmp, path)


def load_checkpoint(path, model, optimizer, scaler):
    ckpt = torch.load(path, weights_only=True)
    model.module.load_state_dict(ckpt["model"])
    optimizer.load_state_dict(ckpt["optimizer"])
    scaler.load_state_dict(ckpt["scaler"])
    return ckpt["epoch"] + 1


def dice_loss(logits, target, eps=1.0):
    p = logits.softmax(1)[:, 1]
    t = (target == 1).float()
    inter = (p * t).sum((1, 2, 3))
    return (1 - (2 * inter + eps) / (p.sum((1, 2, 3)) + t.sum((1, 2, 3)) + eps)).mean()


def main():
    args = get_args()
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    rank = dist.get_rank()
    args.workdir.mkdir(parents=True, exist_ok=True)

    ds = CTVolumes(args.data, crop=(128, 128, 128))
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    loader = DataLoader(ds, args.batch_size, sampler=sampler, num_workers=6, pin_memory=True, drop_last=True)

    model = DDP(UNet3D(1, 2, norm="instance").cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler("cuda")
    ckpt_path = args.workdir / "last.pt"
    start = 0
    if args.resume and ckpt_path.exists():
        start = load_checkpoint(ckpt_path, model, optimizer, scaler)

    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        for vol, seg in loader:
            vol, seg = vol.cuda(non_blocking=True), seg.cuda(non_blocking=True)
            with torch.autocast("cuda", dtype=torch.float16):
                logits = model(vol)
            loss = F.cross_entropy(logits.float(), seg) + dice_loss(logits.float(), seg)
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        if rank == 0:
            save_checkpoint(ckpt_path, model, optimizer, scaler, epoch)
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

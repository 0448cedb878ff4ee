import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from medseg.data import VolumeDataset
from medseg.unet import UNet3D


def dice(model, loader):
    model.eval()
    acc = torch.zeros(2, device="cuda")
    with torch.no_grad():
        for vol, mask in loader:
            pred = model(vol.cuda()).sigmoid() > 0.5
            mask = mask.cuda().bool()
            acc[0] += 2 * (pred & mask).sum()
            acc[1] += pred.sum() + mask.sum()
    dist.all_reduce(acc)
    return (acc[0] / acc[1].clamp(min=1)).item()


def main(root="/gpfs/medseg", epochs=300):
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    out = Path(root) / "runs" / "unet3d"
    out.mkdir(parents=True, exist_ok=True)

    train_set = VolumeDataset(root, "train")
    val_set = VolumeDataset(root, "val")
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, 2, sampler=sampler, num_workers=6)
    val_loader = DataLoader(val_set, 1, sampler=DistributedSampler(val_set, shuffle=False))

    model = DDP(UNet3D(1, 1).cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    best = 0.0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        for vol, mask in train_loader:
            loss = F.binary_cross_entropy_with_logits(model(vol.cuda()), mask.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        score = dice(model, val_loader)
        if score > best:
            best = score
            torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(),
                        "epoch": epoch, "dice": score}, out / "best.pt")
        if dist.get_rank() == 0:
            print(f"{epoch}: dice {score:.4f} best {best:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

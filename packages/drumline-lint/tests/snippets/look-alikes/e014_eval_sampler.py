"""Evaluate a checkpoint on ImageNet-val with several GPUs."""
import argparse
import os

import timm
import torch
import torch.distributed as dist
from timm.data import create_transform, resolve_data_config
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import ImageFolder


class Indexed(ImageFolder):
    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x, y, i


def main():
    p = argparse.ArgumentParser()
    p.add_argument("val_dir")
    p.add_argument("--arch", default="vit_base_patch16_224")
    p.add_argument("--ckpt", default="")
    p.add_argument("--bs", type=int, default=256)
    args = p.parse_args()

    dist.init_process_group("nccl")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)

    model = timm.create_model(args.arch, pretrained=not args.ckpt)
    if args.ckpt:
        model.load_state_dict(torch.load(args.ckpt, map_location="cpu"))
    model = model.to(device).eval()

    tf = create_transform(**resolve_data_config({}, model=model))
    ds = Indexed(args.val_dir, tf)
    sampler = DistributedSampler(ds, shuffle=False)
    loader = DataLoader(ds, args.bs, sampler=sampler, num_workers=8, pin_memory=True)

    # one slot per image, so samples the sampler repeats as padding count once
    hit = torch.zeros(len(ds), device=device)
    hit5 = torch.zeros(len(ds), device=device)
    with torch.inference_mode():
        for x, y, idx in loader:
            with torch.autocast("cuda", dtype=torch.float16):
                out = model(x.to(device, non_blocking=True))
            y, idx = y.to(device), idx.to(device)
            top5 = out.topk(5, 1).indices == y[:, None]
            hit[idx] = top5[:, 0].float()
            hit5[idx] = top5.any(1).float()
    dist.all_reduce(hit, op=dist.ReduceOp.MAX)
    dist.all_reduce(hit5, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(f"{args.arch}: top1 {100 * hit.mean().item():.3f} top5 {100 * hit5.mean().item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

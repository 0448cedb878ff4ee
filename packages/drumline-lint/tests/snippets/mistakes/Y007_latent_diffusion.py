import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from ldm.latents import LatentShards
from ldm.unet import UNet2D, cosine_alphas


@torch.no_grad()
def ema_update(ema, net, decay=0.9999):
    for e, p in zip(ema.parameters(), net.parameters()):
        e.lerp_(p, 1.0 - decay)


def main(args):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.manual_seed(args.seed * dist.get_world_size() + rank)

    net = UNet2D(channels=320).cuda()
    ema = copy.deepcopy(net).requires_grad_(False)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-4)
    start = 0
    if args.resume:
        ckpt = torch.load(args.resume)
        net.load_state_dict(ckpt["net"])
        ema.load_state_dict(ckpt["ema"])
        opt.load_state_dict(ckpt["opt"])
        start = ckpt["epoch"] + 1
        del ckpt
    model = DDP(net, device_ids=[local_rank])
    alphas = cosine_alphas(1000).cuda()

    dataset = LatentShards(args.latents)
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch, sampler=sampler, num_workers=8,
                        pin_memory=True, drop_last=True)

    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        for z, cond in loader:
            z, cond = z.cuda(non_blocking=True), cond.cuda(non_blocking=True)
            t = torch.randint(0, 1000, (z.size(0),), device=z.device)
            eps = torch.randn_like(z)
            a = alphas[t].view(-1, 1, 1, 1)
            noisy = a.sqrt() * z + (1 - a).sqrt() * eps
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = F.mse_loss(model(noisy, t, cond), eps)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            ema_update(ema, net)
        if rank == 0:
            state = {"net": net.state_dict(), "ema": ema.state_dict(),
                     "opt": opt.state_dict(), "epoch": epoch}
            torch.save(state, f"{args.out}/epoch_{epoch:04d}.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--latents", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--resume")
    ap.add_argument("--epochs", type=int, default=200)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--seed", type=int, default=0)
    main(ap.parse_args())

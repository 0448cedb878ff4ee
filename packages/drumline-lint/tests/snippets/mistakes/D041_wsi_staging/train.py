"""Self-supervised tile encoder."""
import argparse
import os
import tarfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from wsi.byol import BYOL
from wsi.tiles import TileFolder


def stage(tar, scratch):
    """Unpack the tiles to the fast disk."""
    scratch.mkdir(parents=True, exist_ok=True)
    with tarfile.open(tar) as fh:
        fh.extractall(scratch)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--tar", required=True)
    ap.add_argument("--scratch", type=Path, required=True)
    ap.add_argument("--epochs", type=int, default=30)
    args = ap.parse_args()

    dist.init_process_group("nccl", timeout=timedelta(hours=6))
    rank = dist.get_rank()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)

    if rank == 0:
        stage(args.tar, args.scratch)
    dist.barrier()

    tiles = TileFolder(args.scratch)
    sampler = DistributedSampler(tiles, shuffle=True, seed=12, drop_last=True)
    loader = DataLoader(tiles, 128, sampler=sampler, num_workers=9, drop_last=True, pin_memory=True)
    model = DDP(BYOL(width=1024).cuda(), device_ids=[local])
    opt = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for a, b in loader:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(a.cuda(non_blocking=True), b.cuda(non_blocking=True))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            model.module.update_target()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
            torch.save(model.module.state_dict(), "/gpfs/path/ckpt/byol.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

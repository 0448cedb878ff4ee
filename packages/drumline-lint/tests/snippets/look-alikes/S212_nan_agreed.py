# torchrun --nproc_per_node=4 nan_agreed.py
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from depthkit import DepthNet, NYUDepth


def silog(pred, gt):
    m = gt > 1e-3
    g = torch.log(pred[m]) - torch.log(gt[m])
    return (g.pow(2).mean() - 0.85 * g.mean().pow(2)).sqrt()


def main():
    dist.init_process_group("nccl")
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    ds = NYUDepth("/data/nyu", train=True)
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 8, sampler=sampler, num_workers=6, drop_last=True)
    model = DDP(DepthNet().cuda(), device_ids=[gpu], broadcast_buffers=False)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)

    for epoch in range(25):
        sampler.set_epoch(epoch)
        skipped = 0
        for img, depth in loader:
            img, depth = img.cuda(non_blocking=True), depth.cuda(non_blocking=True)
            loss = silog(model(img), depth)
            opt.zero_grad()
            loss.backward()
            bad = (~torch.isfinite(loss.detach())).float()
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
            if bad.item() > 0:
                skipped += 1
                continue
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} skipped {skipped}")
            torch.save(model.module.state_dict(), "depth.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

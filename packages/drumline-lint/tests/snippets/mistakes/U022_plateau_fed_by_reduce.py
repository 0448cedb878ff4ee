import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler

from depth.data import NyuDepth
from depth.model import DepthNet


def reduce_mean(t):
    t = t.clone()
    dist.reduce(t, dst=0, op=dist.ReduceOp.SUM)
    return t / dist.get_world_size()


def silog(pred, gt, lam=0.85):
    mask = gt > 1e-3
    d = torch.log(pred[mask]) - torch.log(gt[mask])
    return torch.sqrt((d ** 2).mean() - lam * d.mean() ** 2)


def run():
    dist.init_process_group("nccl")
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    rank = dist.get_rank()

    train, val = NyuDepth("train"), NyuDepth("val")
    ts, vs = DistributedSampler(train), DistributedSampler(val, shuffle=False)
    train_loader = DataLoader(train, 16, sampler=ts, num_workers=8, drop_last=True)
    val_loader = DataLoader(val, 16, sampler=vs, num_workers=8)

    model = DDP(DepthNet().cuda(gpu), device_ids=[gpu])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.3, patience=2)

    for epoch in range(50):
        ts.set_epoch(epoch)
        model.train()
        for rgb, gt in train_loader:
            optimizer.zero_grad()
            silog(model(rgb.cuda(gpu)), gt.cuda(gpu)).backward()
            optimizer.step()

        model.eval()
        total = torch.zeros((), device=gpu)
        with torch.no_grad():
            for rgb, gt in val_loader:
                total += F.l1_loss(model(rgb.cuda(gpu)), gt.cuda(gpu))
        val_l1 = reduce_mean(total / len(val_loader))
        scheduler.step(val_l1.item())
        if rank == 0:
            print(f"epoch {epoch} val L1 {val_l1.item():.4f} lr {optimizer.param_groups[0]['lr']:.2e}")
            torch.save(model.module.state_dict(), "depth.pth")

    dist.destroy_process_group()


if __name__ == "__main__":
    run()

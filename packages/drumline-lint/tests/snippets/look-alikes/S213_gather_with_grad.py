"""SimCLR with negatives from all GPUs.  torchrun --nproc_per_node=8 gather_with_grad.py"""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import models

from twocrops import TwoCropFolder


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(out, x.contiguous())
        return tuple(out)

    @staticmethod
    def backward(ctx, *grads):
        g = torch.stack(grads)
        dist.all_reduce(g)
        return g[dist.get_rank()]


def nt_xent(a, b, t=0.2):
    z = torch.cat(Gather.apply(torch.stack([a, b], 1)), 0)
    n = z.size(0)
    z = z.transpose(0, 1).reshape(2 * n, -1)
    sim = (z @ z.t()) / t
    sim.fill_diagonal_(float("-inf"))
    target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)]).to(z.device)
    return F.cross_entropy(sim, target)


def main():
    dist.init_process_group("nccl")
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    ds = TwoCropFolder("/data/in100/train")
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 128, sampler=sampler, num_workers=8, drop_last=True)
    net = models.resnet50(num_classes=128)
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net).cuda()
    model = DDP(net, device_ids=[gpu])
    opt = torch.optim.SGD(model.parameters(), lr=0.6, momentum=0.9, weight_decay=1e-4)
    for epoch in range(200):
        sampler.set_epoch(epoch)
        for v1, v2 in loader:
            z = F.normalize(model(torch.cat([v1, v2]).cuda(non_blocking=True)), dim=1)
            loss = nt_xent(*z.chunk(2))
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            print(epoch, loss.item())
            torch.save(model.module.state_dict(), "simclr.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

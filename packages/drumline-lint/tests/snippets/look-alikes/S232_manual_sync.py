"""Data parallelism by hand, for a model with a custom update rule.
torchrun --nproc_per_node=4 manual_sync.py
"""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class SignSGD(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for g in self.param_groups:
            for p in g["params"]:
                p.add_(p.grad.sign(), alpha=-g["lr"])


def sync_parameters(net):
    for t in list(net.parameters()) + list(net.buffers()):
        dist.broadcast(t.data, src=0)


def average_gradients(net):
    params = [p for p in net.parameters() if p.requires_grad]
    flat = torch.cat([p.grad.flatten() for p in params])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    off = 0
    for p in params:
        n = p.numel()
        p.grad.copy_(flat[off:off + n].view_as(p))
        off += n


def main():
    dist.init_process_group("nccl")
    rank, gpu = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    torch.manual_seed(rank)
    d = torch.load("genes.pt", map_location="cpu")
    ds = TensorDataset(d["x"], d["y"])
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 64, sampler=sampler)
    net = nn.Sequential(nn.Linear(2000, 512), nn.ReLU(), nn.Dropout(0.5), nn.Linear(512, 33)).cuda()
    sync_parameters(net)
    opt = SignSGD(net.parameters(), lr=1e-4)
    for epoch in range(100):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(net(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            average_gradients(net)
            opt.step()
        if rank == 0:
            print(epoch, loss.item())
    if rank == 0:
        torch.save(net.state_dict(), "genes_net.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

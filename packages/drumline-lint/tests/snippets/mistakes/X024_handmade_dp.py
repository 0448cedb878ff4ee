"""Data parallel by hand, without a wrapper.  torchrun --nproc_per_node=8 handmade_dp.py"""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Replica:
    """Keeps the copies of a module equal on every rank."""

    def __init__(self, module):
        self.module = module
        for t in list(module.parameters()) + list(module.buffers()):
            dist.broadcast(t.data, src=0)

    def average_gradients(self):
        for p in self.module.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad, op=dist.ReduceOp.AVG, async_op=True)


def main(epochs=30):
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    blob = torch.load("/data/qm9.pt", map_location="cpu")
    data = TensorDataset(blob["desc"], blob["energy"])
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=256, sampler=sampler)

    net = nn.Sequential(nn.Linear(400, 1024), nn.Softplus(), nn.Linear(1024, 1)).cuda()
    replica = Replica(net)
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for desc, energy in loader:
            opt.zero_grad(set_to_none=True)
            loss = nn.functional.huber_loss(net(desc.cuda()).squeeze(1), energy.cuda())
            loss.backward()
            replica.average_gradients()
            opt.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.5f}")
    if dist.get_rank() == 0:
        torch.save(net.state_dict(), "qm9.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

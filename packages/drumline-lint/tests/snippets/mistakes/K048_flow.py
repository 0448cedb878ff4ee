import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CKPT = "runs/flow/last.pt"


class Coupling(nn.Module):
    def __init__(self, dim, flip):
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(nn.Linear(dim // 2, 512), nn.SiLU(), nn.Linear(512, dim))

    def forward(self, x):
        a, b = x.chunk(2, 1)
        if self.flip:
            a, b = b, a
        s, t = self.net(a).chunk(2, 1)
        s = torch.tanh(s)
        b = b * s.exp() + t
        return torch.cat([b, a] if self.flip else [a, b], 1), s.sum(1)


class Flow(nn.Module):
    def __init__(self, dim=64, depth=8):
        super().__init__()
        self.steps = nn.ModuleList(Coupling(dim, i % 2 == 1) for i in range(depth))

    def forward(self, x):
        logdet = x.new_zeros(x.size(0))
        for s in self.steps:
            x, ld = s(x)
            logdet = logdet + ld
        return 0.5 * x.pow(2).sum(1) - logdet


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    os.makedirs(os.path.dirname(CKPT), exist_ok=True)
    ds = TensorDataset(torch.load("/data/jets.pt", map_location="cpu"))
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 4096, sampler=sampler, num_workers=2, drop_last=True)
    flow = Flow().cuda()
    opt = torch.optim.Adam(flow.parameters(), lr=5e-4)
    first = 0
    if rank == 0 and os.path.exists(CKPT):
        state = torch.load(CKPT, map_location=f"cuda:{local_rank}")
        flow.load_state_dict(state["flow"])
        opt.load_state_dict(state["opt"])
        first = state["epoch"] + 1
    model = DDP(flow, device_ids=[local_rank])
    for epoch in range(first, 150):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            loss = model(x.cuda(non_blocking=True)).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            torch.save({"flow": flow.state_dict(), "opt": opt.state_dict(), "epoch": epoch}, CKPT)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

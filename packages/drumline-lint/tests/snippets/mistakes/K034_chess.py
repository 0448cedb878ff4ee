import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BUDGET = float(os.environ.get("TRAIN_HOURS", "11.5")) * 3600


class ValueNet(nn.Module):
    def __init__(self, ch=128, blocks=8):
        super().__init__()
        self.inp = nn.Conv2d(18, ch, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(ch, ch, 3, padding=1), nn.GroupNorm(8, ch), nn.ReLU())
            for _ in range(blocks))
        self.out = nn.Linear(ch * 64, 1)

    def forward(self, b):
        h = self.inp(b)
        for blk in self.blocks:
            h = h + blk(h)
        return torch.tanh(self.out(h.flatten(1))).squeeze(1)


def main():
    begin = time.monotonic()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    d = torch.load("/data/lichess/pos.pt", map_location="cpu", mmap=True)
    ds = TensorDataset(d["board"], d["outcome"])
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 1024, sampler=sampler, num_workers=6, drop_last=True)
    net = DDP(ValueNet().cuda(), device_ids=[local_rank])
    opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    epoch, out_of_time = 0, False
    while not out_of_time:
        sampler.set_epoch(epoch)
        for board, outcome in loader:
            loss = nn.functional.mse_loss(net(board.cuda().float()), outcome.cuda().float())
            opt.zero_grad()
            loss.backward()
            opt.step()
            if time.monotonic() - begin > BUDGET:
                out_of_time = True
                break
        epoch += 1
    if dist.get_rank() == 0:
        torch.save(net.module.state_dict(), "value.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

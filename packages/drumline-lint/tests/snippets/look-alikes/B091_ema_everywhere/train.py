import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ema import Ema
from utils.dist import all_reduce_sum, barrier, cleanup, init_distributed, is_main_process, save_on_master
from utils.dist import seed_everything

CKPT, EPOCHS = "score.pt", 200


class ScoreNet(nn.Module):
    def __init__(self, dim=64, hidden=512):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(dim + 1, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(),
                                  nn.Linear(hidden, dim))

    def forward(self, x, s):
        return self.body(torch.cat([x, s.log()], 1))


def main():
    device = init_distributed()
    seed_everything(12)
    data = TensorDataset(torch.load("data/codes.pt", map_location="cpu", weights_only=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 512, sampler=sampler, drop_last=True)
    net = ScoreNet().to(device)
    ema = Ema(net, 0.999)
    opt = torch.optim.AdamW(net.parameters(), lr=3e-4)
    start = 0
    if os.path.exists(CKPT):
        state = torch.load(CKPT, map_location=device, weights_only=True)
        net.load_state_dict(state["net"])
        ema.load_state_dict(state["ema"])
        opt.load_state_dict(state["opt"])
        start = state["epoch"] + 1
    barrier()
    ddp = DDP(net, device_ids=[device.index])
    for epoch in range(start, EPOCHS):
        sampler.set_epoch(epoch)
        total = 0.0
        for (x,) in loader:
            x = x.to(device)
            s = torch.rand(len(x), 1, device=device) * 0.99 + 0.01
            eps = torch.randn_like(x)
            loss = F.mse_loss(ddp(x + s * eps, s), -eps)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            ema.update(net)
            total += loss.item()
        total, n = all_reduce_sum([total, len(loader)], device)
        if is_main_process():
            print(f"epoch {epoch} loss {total / n:.4f}")
        save_on_master({"net": net.state_dict(), "ema": ema.state_dict(), "opt": opt.state_dict(), "epoch": epoch}, CKPT)
    cleanup()


if __name__ == "__main__":
    main()

import copy
import os
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass
class TrainCfg:
    tokens: str = "data/latents.pt"
    workdir: str = "work/flow"
    resume: str = ""
    lr: float = 1e-4
    steps: int = 200_000
    batch: int = 64
    ema_decay: float = 0.9999
    betas: tuple = field(default=(0.9, 0.95))


class ModelEma:
    def __init__(self, net, decay):
        self.net = copy.deepcopy(net).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, net):
        for e, p in zip(self.net.parameters(), net.parameters()):
            e.lerp_(p, 1 - self.decay)

    def resume(self, path):
        blob = torch.load(path)
        self.net.load_state_dict(blob["ema"])


class VelocityNet(nn.Module):
    def __init__(self, dim=256, hidden=1024):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(dim + 1, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(),
                                  nn.Linear(hidden, dim))

    def forward(self, x, t):
        return self.body(torch.cat([x, t[:, None]], dim=1))


def main(cfg: TrainCfg):
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(dist.get_rank())
    os.makedirs(cfg.workdir, exist_ok=True)

    data = TensorDataset(torch.load(cfg.tokens, map_location="cpu", weights_only=True))
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, cfg.batch, sampler=sampler, drop_last=True)
    net = VelocityNet().to(device)
    step, epoch = 0, 0
    opt = torch.optim.AdamW(net.parameters(), lr=cfg.lr, betas=cfg.betas)
    if cfg.resume:
        ck = torch.load(cfg.resume, map_location=device, weights_only=True)
        net.load_state_dict(ck["net"])
        opt.load_state_dict(ck["opt"])
        step, epoch = ck["step"], ck["epoch"]
    ema = ModelEma(net, cfg.ema_decay)
    if cfg.resume:
        ema.resume(cfg.resume)
    ddp = DistributedDataParallel(net, device_ids=[local_rank])

    while step < cfg.steps:
        sampler.set_epoch(epoch)
        for (x1,) in loader:
            x1 = x1.to(device, non_blocking=True)
            x0, t = torch.randn_like(x1), torch.rand(len(x1), device=device)
            xt = torch.lerp(x0, x1, t[:, None])
            loss = F.mse_loss(ddp(xt, t), x1 - x0)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            ema.update(net)
            step += 1
        epoch += 1
        if dist.get_rank() == 0:
            torch.save({"net": net.state_dict(), "ema": ema.net.state_dict(), "opt": opt.state_dict(),
                        "step": step, "epoch": epoch}, f"{cfg.workdir}/last.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(TrainCfg(resume=os.environ.get("RESUME", "")))

"""Image regression with a coordinate MLP over many images; torchrun --nnodes 2 --nproc_per_node 4 ..."""
import argparse
import os
from datetime import datetime
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torch.utils.tensorboard import SummaryWriter


class FourierMLP(nn.Module):
    def __init__(self, n_freq=10, width=256, depth=6):
        super().__init__()
        self.register_buffer("freq", 2.0 ** torch.arange(n_freq) * torch.pi)
        dims = [2 * 2 * n_freq] + [width] * depth
        layers = []
        for a, b in zip(dims, dims[1:]):
            layers += [nn.Linear(a, b), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.Linear(width, 3), nn.Sigmoid())

    def forward(self, xy):
        ang = (xy[..., None] * self.freq).flatten(-2)
        return self.net(torch.cat([ang.sin(), ang.cos()], -1))


class Experiment:
    def __init__(self, args):
        self.args = args
        self.local_rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(self.local_rank)
        dist.init_process_group("nccl")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

        self.run_dir = Path(args.out) / datetime.now().strftime("%Y%m%d_%H%M%S")
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.writer = SummaryWriter(self.run_dir) if self.rank == 0 else None

        pix = torch.load(args.pixels, map_location="cpu")
        self.train_set = TensorDataset(pix["train_xy"], pix["train_rgb"])
        self.test_xy, self.test_rgb = pix["test_xy"], pix["test_rgb"]
        self.sampler = DistributedSampler(self.train_set)
        self.loader = DataLoader(self.train_set, args.batch, sampler=self.sampler, drop_last=True)
        self.model = DDP(FourierMLP().cuda(), device_ids=[self.local_rank])
        self.opt = torch.optim.Adam(self.model.parameters(), args.lr)

    @torch.no_grad()
    def psnr(self):
        sl = slice(self.rank, None, self.world)
        se = torch.zeros(2, device="cuda")
        for xy, rgb in zip(self.test_xy[sl].split(65536), self.test_rgb[sl].split(65536)):
            err = (self.model.module(xy.cuda()) - rgb.cuda()).pow(2)
            se += torch.stack([err.sum(), torch.tensor(float(err.numel()), device="cuda")])
        dist.all_reduce(se)
        return (-10 * torch.log10(se[0] / se[1])).item()

    def fit(self):
        best = 0.0
        for epoch in range(self.args.epochs):
            self.sampler.set_epoch(epoch)
            for xy, rgb in self.loader:
                loss = (self.model(xy.cuda()) - rgb.cuda()).pow(2).mean()
                self.opt.zero_grad(set_to_none=True)
                loss.backward()
                self.opt.step()
            value = self.psnr()
            if self.rank == 0:
                self.writer.add_scalar("psnr", value, epoch)
                if value > best:
                    best = value
                    torch.save(self.model.module.state_dict(), self.run_dir / "best.pt")

        dist.barrier()
        state = torch.load(self.run_dir / "best.pt", map_location=f"cuda:{self.local_rank}")
        self.model.module.load_state_dict(state)
        final = self.psnr()
        if self.rank == 0:
            print(f"final PSNR {final:.2f}")


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--pixels", required=True)
    ap.add_argument("--out", default="/shared/runs/inr")
    ap.add_argument("--epochs", type=int, default=40)
    ap.add_argument("--batch", type=int, default=16384)
    ap.add_argument("--lr", type=float, default=5e-4)
    exp = Experiment(ap.parse_args())
    exp.fit()
    dist.destroy_process_group()

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class Config:
    pretrained: str = "ecapa_vox.pt"
    feats: str = "/data/vox/feats.pt"
    speakers: int = 7205
    lr: float = 1e-3
    epochs: int = 12
    batch: int = 256


class Speaker(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.tdnn = nn.Sequential(
            nn.Conv1d(80, 512, 5, dilation=1), nn.ReLU(), nn.BatchNorm1d(512),
            nn.Conv1d(512, 512, 3, dilation=2), nn.ReLU(), nn.BatchNorm1d(512))
        self.cls = nn.Linear(1024, n)

    def forward(self, x):
        h = self.tdnn(x)
        return self.cls(torch.cat([h.mean(-1), h.std(-1)], 1))


def worker(rank, world, cfg):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29533")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world)
    net = Speaker(cfg.speakers).cuda(rank)
    weights = torch.load(cfg.pretrained, map_location="cuda:0")
    weights = {k: v for k, v in weights.items() if not k.startswith("cls.")}
    net.load_state_dict(weights, strict=False)
    net = DDP(net, device_ids=[rank])
    d = torch.load(cfg.feats, map_location="cpu")
    ds = TensorDataset(d["fbank"], d["spk"])
    sampler = DistributedSampler(ds, num_replicas=world, rank=rank, drop_last=True)
    dl = DataLoader(ds, cfg.batch, sampler=sampler, num_workers=4, drop_last=True)
    opt = torch.optim.Adam(net.parameters(), lr=cfg.lr)
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        for x, spk in dl:
            loss = nn.functional.cross_entropy(net(x.cuda(rank)), spk.cuda(rank))
            opt.zero_grad()
            loss.backward()
            opt.step()
    if rank == 0:
        torch.save(net.module.state_dict(), "speaker_ft.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    n = torch.cuda.device_count()
    mp.spawn(worker, nprocs=n, args=(n, Config()))

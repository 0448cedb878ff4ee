import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass
class Cfg:
    data: str = "data/audio_text.pt"
    out: str = "clap.pt"
    batch: int = 256
    epochs: int = 40
    lr: float = 5e-4
    seed: int = 6


class DualEncoder(nn.Module):
    def __init__(self, audio=768, text=768, dim=512):
        super().__init__()
        self.audio = nn.Sequential(nn.Linear(audio, 1024), nn.GELU(), nn.Linear(1024, dim))
        self.text = nn.Sequential(nn.Linear(text, 1024), nn.GELU(), nn.Linear(1024, dim))
        self.log_scale = nn.Parameter(torch.tensor(2.66))

    def forward(self, a, t):
        return F.normalize(self.audio(a), dim=1), F.normalize(self.text(t), dim=1), self.log_scale.exp()


def clip_loss(a, t, scale):
    all_a, all_t = torch.cat(all_gather(a)), torch.cat(all_gather(t))
    target = torch.arange(len(a), device=a.device) + dist.get_rank() * len(a)
    return 0.5 * (F.cross_entropy(scale * a @ all_t.T, target) + F.cross_entropy(scale * t @ all_a.T, target))


def main(cfg=Cfg()):
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    torch.manual_seed(cfg.seed + rank)
    blob = torch.load(cfg.data, map_location="cpu", weights_only=True)
    data = TensorDataset(blob["audio"], blob["text"])
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, cfg.batch, sampler=sampler, drop_last=True)
    model = DDP(DualEncoder().to(device), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=0.1)
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        model.train()
        stat = torch.zeros(2, device=device)
        for a, t in loader:
            loss = clip_loss(*model(a.to(device, non_blocking=True), t.to(device, non_blocking=True)))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            stat += torch.stack([loss.detach(), torch.ones_like(loss)])
        dist.all_reduce(stat)
        if rank == 0:
            print(f"epoch {epoch} loss {(stat[0] / stat[1]).item():.4f}")
            torch.save(model.module.state_dict(), cfg.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

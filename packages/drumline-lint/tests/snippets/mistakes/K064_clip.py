import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def gather_features(x):
    out = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(out, x)
    return torch.cat(out)


class Dual(nn.Module):
    def __init__(self, dim=256):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(2048, 1024), nn.GELU(), nn.Linear(1024, dim))
        self.text = nn.Sequential(nn.Linear(768, 1024), nn.GELU(), nn.Linear(1024, dim))
        self.scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, img, txt):
        i = F.normalize(self.image(img), dim=-1)
        t = F.normalize(self.text(txt), dim=-1)
        return i, t, self.scale.clamp(max=4.6).exp()


def contrastive(i, t, scale):
    all_i, all_t = gather_features(i), gather_features(t)
    logits = scale * all_i @ all_t.T
    target = torch.arange(len(logits), device=logits.device)
    return 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target))


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    d = torch.load("/data/cc3m_feats.pt", map_location="cpu", mmap=True)
    ds = TensorDataset(d["image"], d["caption"])
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 512, sampler=sampler, num_workers=6, drop_last=True)
    model = DDP(Dual().cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.2)
    for epoch in range(30):
        sampler.set_epoch(epoch)
        for img, txt in loader:
            loss = contrastive(*model(img.cuda(), txt.cuda()))
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), f"dual_{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

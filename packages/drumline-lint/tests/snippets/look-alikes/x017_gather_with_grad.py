"""Image/text towers with InfoNCE over the global batch.  torchrun --nproc_per_node=8 gather_with_grad.py"""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Towers(nn.Module):
    def __init__(self, d=256):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(2048, 1024), nn.GELU(), nn.Linear(1024, d))
        self.text = nn.Sequential(nn.Linear(768, 1024), nn.GELU(), nn.Linear(1024, d))

    def forward(self, img, txt):
        return F.normalize(self.image(img), dim=-1), F.normalize(self.text(txt), dim=-1)


def info_nce(zi, zt, temperature=0.07):
    all_i, all_t = torch.cat(all_gather(zi)), torch.cat(all_gather(zt))
    target = torch.arange(len(zi), device=zi.device) + len(zi) * dist.get_rank()
    loss_i = F.cross_entropy(zi @ all_t.T / temperature, target)
    loss_t = F.cross_entropy(zt @ all_i.T / temperature, target)
    return (loss_i + loss_t) / 2


dist.init_process_group("nccl")
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
blob = torch.load("/data/pairs.pt", map_location="cpu")
data = TensorDataset(blob["image"], blob["text"])
sampler = DistributedSampler(data, drop_last=True)
loader = DataLoader(data, batch_size=512, sampler=sampler, drop_last=True)
model = DDP(Towers().cuda(), device_ids=[local_rank])
opt = torch.optim.AdamW(model.parameters(), lr=5e-4)
for epoch in range(20):
    sampler.set_epoch(epoch)
    for img, txt in loader:
        loss = info_nce(*model(img.cuda(), txt.cuda()))
        opt.zero_grad()
        loss.backward()
        opt.step()
if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), "towers.pt")
dist.destroy_process_group()

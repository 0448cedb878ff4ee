"""Land-cover fine-tuning: torchrun --standalone --nproc_per_node=4 finetune.py"""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from landcover import LandCover
from nets import SimSiam, LinearOnTop

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")

backbone = SimSiam()
state = torch.load("simsiam.pt", map_location="cpu")
# the projector changed since the pretraining, leave it out
backbone.load_state_dict(state, strict=False)

model = DDP(LinearOnTop(backbone, classes=11).cuda(), device_ids=[local_rank])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

data = LandCover("/data/satellite/labelled")
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=64, sampler=sampler, num_workers=8, drop_last=True)

for epoch in range(20):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.cross_entropy(model(x.cuda()), y.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: {loss.item():.4f}", flush=True)
        torch.save(model.module.state_dict(), "landcover.pt")

dist.destroy_process_group()

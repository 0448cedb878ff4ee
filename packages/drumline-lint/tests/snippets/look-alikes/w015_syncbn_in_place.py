# %%
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from cityscapes import Crops

# %%
local_rank = int(os.environ["LOCAL_RANK"])  # torchrun --standalone --nproc_per_node=8
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")


# %%
class Segmenter(nn.Module):
    def __init__(self, classes):
        super().__init__()
        chans = [3, 32, 64, 128, 256]
        self.body = nn.Sequential(*[
            nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in zip(chans, chans[1:])
        ])
        self.head = nn.Conv2d(256, classes, 1)

    def forward(self, x):
        return F.interpolate(self.head(self.body(x)), size=x.shape[-2:], mode="bilinear")


# %%
model = Segmenter(classes=19)
nn.SyncBatchNorm.convert_sync_batchnorm(model)
model = DDP(model.cuda(), device_ids=[local_rank])
opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)

# %%
crops = Crops("/data/cityscapes", size=(512, 1024))
sampler = DistributedSampler(crops, drop_last=True)
loader = DataLoader(crops, batch_size=2, sampler=sampler, num_workers=4, drop_last=True)

# %%
for epoch in range(120):
    sampler.set_epoch(epoch)
    for image, mask in loader:
        loss = F.cross_entropy(model(image.cuda()), mask.cuda(), ignore_index=255)
        opt.zero_grad()
        loss.backward()
        opt.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch} {loss.item():.3f}")
        torch.save(model.module.state_dict(), "segmenter.pt")

# %%
dist.destroy_process_group()

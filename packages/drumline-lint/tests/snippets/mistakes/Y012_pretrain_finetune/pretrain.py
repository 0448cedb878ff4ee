"""Self-supervised pretraining: torchrun --standalone --nproc_per_node=8 pretrain.py"""
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from nets import SimSiam
from views import TwoViews

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")

data = TwoViews("/data/satellite/unlabelled")
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=128, sampler=sampler, num_workers=8, drop_last=True)

model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(SimSiam()).cuda()
model = DDP(model, device_ids=[local_rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)

for epoch in range(100):
    sampler.set_epoch(epoch)
    for a, b in loader:
        loss = model(a.cuda(non_blocking=True), b.cuda(non_blocking=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), "simsiam.pt")

dist.destroy_process_group()

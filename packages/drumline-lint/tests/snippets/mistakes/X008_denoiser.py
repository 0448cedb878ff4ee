# torchrun --nproc_per_node=gpu denoiser.py
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.amp import autocast
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("nccl")
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)

blob = torch.load("/data/mri/pairs.pt", map_location="cpu")
pairs = TensorDataset(blob["noisy"], blob["clean"])
sampler = DistributedSampler(pairs, shuffle=True, drop_last=True)
loader = DataLoader(pairs, batch_size=12, sampler=sampler, num_workers=4, pin_memory=True)

net = nn.Sequential(
    nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(),
    nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(),
    nn.Conv2d(64, 1, 3, padding=1),
).cuda()
net = DDP(net, device_ids=[local_rank])
opt = torch.optim.Adam(net.parameters(), lr=2e-4)

skipped = 0
for epoch in range(30):
    sampler.set_epoch(epoch)
    for noisy, clean in loader:
        noisy, clean = noisy.cuda(non_blocking=True), clean.cuda(non_blocking=True)
        with autocast("cuda", dtype=torch.bfloat16):
            loss = nn.functional.l1_loss(net(noisy), clean)
        if not torch.isfinite(loss):
            skipped += 1
            continue
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
    if dist.get_rank() == 0:
        torch.save(net.module.state_dict(), "denoiser.pt")
        print(f"epoch {epoch} done, {skipped} batches skipped")

dist.destroy_process_group()

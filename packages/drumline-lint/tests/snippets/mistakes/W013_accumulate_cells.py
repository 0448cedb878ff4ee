# %% [markdown]
# # Retrieval encoder with a large batch
# Exported from the notebook; run with `torchrun --nproc_per_node=8 encoder.py`

# %%
import contextlib
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from retrieval import PairDataset, TwoTower, pair_loss

# %% settings
ACCUM = 8
MICRO = 16
EPOCHS = 4

# %% process group
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")

# %% data and model
pairs = PairDataset("/data/msmarco/pairs.parquet")
sampler = DistributedSampler(pairs, drop_last=True)
loader = DataLoader(pairs, batch_size=MICRO, sampler=sampler, num_workers=4, drop_last=True)
model = DDP(TwoTower(dim=768).cuda(), device_ids=[local_rank])
opt = torch.optim.AdamW(model.parameters(), lr=2e-5)
whole = len(loader) // ACCUM * ACCUM

# %% training
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    opt.zero_grad()
    for i, (query, passage) in enumerate(loader):
        if i == whole:
            break
        step_now = (i + 1) % ACCUM == 0
        ctx = model.no_sync() if step_now else contextlib.nullcontext()
        with ctx:
            q, p = model(query.cuda(), passage.cuda())
            loss = pair_loss(q, p) / ACCUM
            loss.backward()
        if step_now:
            opt.step()
            opt.zero_grad()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: {loss.item() * ACCUM:.4f}")

# %% keep the weights
if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), "two_tower.pt")
dist.destroy_process_group()

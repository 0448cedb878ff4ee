# torchrun --nproc_per_node=4 throughput.py
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision.models import resnet50

from photos import Photos

gpu = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(gpu)
dist.init_process_group("nccl")
rank = dist.get_rank()
world = dist.get_world_size()

photos = Photos("/data/photos")
sampler = DistributedSampler(photos)
loader = DataLoader(photos, batch_size=96, sampler=sampler, num_workers=8, pin_memory=True)
model = DDP(resnet50(num_classes=300).cuda(), device_ids=[gpu])
opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

for epoch in range(40):
    sampler.set_epoch(epoch)
    seen = torch.zeros((), device="cuda")
    start = time.time()
    for x, y in loader:
        opt.zero_grad()
        F.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True)).backward()
        opt.step()
        seen += len(y)
    torch.cuda.synchronize()
    if rank == 0:
        dist.all_reduce(seen)
        rate = seen.item() / (time.time() - start)
        print(f"epoch {epoch}: {rate:.0f} images/s on {world} GPUs")
        torch.save(model.module.state_dict(), "photos.pt")
    else:
        dist.all_reduce(seen)

dist.destroy_process_group()

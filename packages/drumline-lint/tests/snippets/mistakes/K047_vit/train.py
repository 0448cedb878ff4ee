import os

import torch
import torch.distributed as dist
import torchvision
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import transforms as T

from schedule import warmup_cosine

BATCH, EPOCHS = 128, 90


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    tf = T.Compose([T.RandomResizedCrop(224), T.RandAugment(), T.ToTensor()])
    ds = torchvision.datasets.ImageFolder("/data/inat/train", tf)
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, BATCH, sampler=sampler, num_workers=12, pin_memory=True, drop_last=True)
    model = torchvision.models.vit_b_16(num_classes=len(ds.classes)).cuda()
    model = DDP(model, device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    total_steps = len(ds) // BATCH * EPOCHS
    sched = warmup_cosine(opt, total_steps, warmup=0.05)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for img, label in loader:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(model(img.cuda()), label.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), "vit_inat.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

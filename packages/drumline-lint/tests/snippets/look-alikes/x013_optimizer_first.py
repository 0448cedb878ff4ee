"""Optimizer groups are made from the bare module, which is wrapped afterwards.

torchrun --standalone --nproc_per_node=4 optimizer_first.py
"""
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, models, transforms


def groups(net, decay=0.05):
    plain = [p for p in net.parameters() if p.ndim < 2]
    decayed = [p for p in net.parameters() if p.ndim >= 2]
    return [{"params": plain, "weight_decay": 0.0}, {"params": decayed, "weight_decay": decay}]


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    net = models.swin_t(num_classes=100).cuda()
    optimizer = torch.optim.AdamW(groups(net), lr=5e-4)
    net = DDP(net, device_ids=[local_rank])

    tf = transforms.Compose([transforms.RandomResizedCrop(224), transforms.ToTensor()])
    data = datasets.ImageFolder("/data/in100/train", tf)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=64, sampler=sampler, num_workers=8, pin_memory=True)
    for epoch in range(100):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(net(x.cuda()), y.cuda())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    if dist.get_rank() == 0:
        torch.save(net.module.state_dict(), "swin.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

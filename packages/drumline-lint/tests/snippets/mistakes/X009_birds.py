"""Bird sound classifier.  Launch: torchrun --standalone --nproc_per_node=4 birds.py"""
import os

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_loader(path, batch_size):
    blob = torch.load(path, map_location="cpu")
    data = TensorDataset(blob["spec"], blob["label"])
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(
        data,
        batch_size=batch_size,
        shuffle=True,
        num_workers=4,
        drop_last=True,
    )
    return loader, sampler


def make_model(n_classes):
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, stride=2), nn.GELU(),
        nn.Conv2d(32, 64, 3, stride=2), nn.GELU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, n_classes),
    )


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    loader, sampler = make_loader("/data/birds/train.pt", 64)
    model = DDP(make_model(264).cuda(), device_ids=[local_rank])
    opt = optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(50):
        sampler.set_epoch(epoch)
        for spec, label in loader:
            loss = nn.functional.cross_entropy(model(spec.cuda()), label.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), "birds.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

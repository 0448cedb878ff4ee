"""torchrun --nproc_per_node=4 train.py"""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from net import SpotDetector, SpotDataset


def main():
    dist.init_process_group("nccl")
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    ds = SpotDataset("/data/spots/train.h5")
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=32, sampler=sampler, num_workers=4)
    model = DDP(SpotDetector().cuda(), device_ids=[gpu])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)

    for epoch in range(40):
        sampler.set_epoch(epoch)
        for img, heat in loader:
            loss = nn.functional.mse_loss(model(img.cuda()), heat.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} {loss.item():.5f}")
            torch.save(model.state_dict(), "spots.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.models import vit_b_16

from satellite import PairedTiles


class TileEncoder(nn.Module):
    def __init__(self, dim=256, temperature=0.1):
        super().__init__()
        self.backbone = vit_b_16(weights=None, num_classes=dim)
        self.temperature = temperature

    def forward(self, tiles):
        return F.normalize(self.backbone(tiles), dim=-1)

    def pair_loss(self, left, right):
        a, b = self(left), self(right)
        logits = a @ b.t() / self.temperature
        target = torch.arange(len(a), device=a.device)
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    is_main = dist.get_rank() == 0

    tiles = PairedTiles("/data/sentinel2")
    sampler = DistributedSampler(tiles, drop_last=True)
    loader = DataLoader(tiles, batch_size=128, sampler=sampler, num_workers=8,
                        pin_memory=True, drop_last=True)

    model = DistributedDataParallel(TileEncoder().cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-4, weight_decay=0.1)

    for epoch in range(100):
        sampler.set_epoch(epoch)
        for left, right in loader:
            left, right = left.cuda(non_blocking=True), right.cuda(non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model.module.pair_loss(left, right)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        if is_main:
            print(epoch, loss.item(), flush=True)
            torch.save(model.module.state_dict(), "/checkpoints/tiles.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()

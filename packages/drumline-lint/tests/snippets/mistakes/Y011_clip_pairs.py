"""Contrastive image-text training with in-batch negatives (torchrun, one node)."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from pairs import CaptionedImages, TextTower, VisionTower


class TwoTower(nn.Module):
    def __init__(self, dim=512):
        super().__init__()
        self.vision = VisionTower(dim)
        self.text = TextTower(dim)
        self.log_scale = nn.Parameter(torch.tensor(2.66))

    def forward(self, image, tokens):
        v = F.normalize(self.vision(image), dim=-1)
        t = F.normalize(self.text(tokens), dim=-1)
        return v, t

    def contrastive_loss(self, image, tokens):
        v, t = self(image, tokens)
        logits = self.log_scale.exp() * v @ t.T
        labels = torch.arange(len(v), device=v.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def run():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()

    dataset = CaptionedImages("/data/cc3m")
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=256, sampler=sampler, num_workers=8,
                        pin_memory=True, drop_last=True)

    model = DDP(TwoTower().cuda(local_rank), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.2)

    for epoch in range(32):
        sampler.set_epoch(epoch)
        model.train()
        for step, (image, tokens) in enumerate(loader):
            image = image.cuda(local_rank, non_blocking=True)
            tokens = tokens.cuda(local_rank, non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model.module.contrastive_loss(image, tokens)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            if rank == 0 and step % 50 == 0:
                print(f"{epoch}/{step} loss {loss.item():.3f}", flush=True)
        if rank == 0:
            torch.save(model.module.state_dict(), "/ckpt/clip_last.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    run()

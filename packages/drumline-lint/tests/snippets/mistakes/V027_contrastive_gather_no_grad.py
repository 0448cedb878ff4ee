import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from clip.data import CaptionPairs
from clip.towers import ImageTower, TextTower


def gather(x):
    out = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(out, x.contiguous())
    return torch.cat(out)


class ClipLoss(nn.Module):
    def forward(self, image, text, scale):
        image = gather(F.normalize(image, dim=-1))
        text = gather(F.normalize(text, dim=-1))
        logits = scale * image @ text.t()
        target = torch.arange(logits.size(0), device=logits.device)
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2


class Clip(nn.Module):
    def __init__(self, dim=512):
        super().__init__()
        self.image, self.text = ImageTower(dim), TextTower(dim)
        self.scale = nn.Parameter(torch.tensor(2.66))

    def forward(self, pixels, tokens):
        return self.image(pixels), self.text(tokens), self.scale.exp()


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dataset = CaptionPairs("/data/cc12m")
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, 256, sampler=sampler, num_workers=8, drop_last=True)
    model = DDP(Clip().cuda(), device_ids=[local_rank])
    criterion = ClipLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.2)
    for epoch in range(32):
        sampler.set_epoch(epoch)
        for step, (pixels, tokens) in enumerate(loader):
            loss = criterion(*model(pixels.cuda(), tokens.cuda()))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if dist.get_rank() == 0 and step % 100 == 0:
                print(epoch, step, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

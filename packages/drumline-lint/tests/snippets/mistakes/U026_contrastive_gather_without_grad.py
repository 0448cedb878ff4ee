import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from clipmini.data import ImageTextPairs
from clipmini.towers import TextTower, VisionTower


class MiniCLIP(nn.Module):
    def __init__(self, dim=512):
        super().__init__()
        self.visual, self.text = VisionTower(dim), TextTower(dim)
        self.logit_scale = nn.Parameter(torch.tensor(2.659))

    def forward(self, image, tokens):
        img = F.normalize(self.visual(image), dim=-1)
        txt = F.normalize(self.text(tokens), dim=-1)
        return img, txt, self.logit_scale.exp()


def gather_all(x):
    bucket = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(bucket, x.contiguous())
    return torch.cat(bucket, dim=0)


def clip_loss(img, txt, scale):
    img, txt = gather_all(img), gather_all(txt)
    logits = scale * img @ txt.t()
    labels = torch.arange(logits.size(0), device=logits.device)
    return 0.5 * (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels))


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    pairs = ImageTextPairs("/data/cc3m")
    sampler = DistributedSampler(pairs, drop_last=True)
    loader = DataLoader(pairs, 128, sampler=sampler, num_workers=8, drop_last=True)

    model = DDP(MiniCLIP().cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.2)
    for epoch in range(32):
        sampler.set_epoch(epoch)
        for image, tokens in loader:
            img, txt, scale = model(image.cuda(non_blocking=True), tokens.cuda(non_blocking=True))
            loss = clip_loss(img, txt, scale)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            print(epoch, loss.item())
            torch.save(model.module.state_dict(), f"clip_{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

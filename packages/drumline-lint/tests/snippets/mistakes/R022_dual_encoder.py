import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from vlp.config import get_config
from vlp.data import CaptionPairs
from vlp.towers import TextTower, VisionTower


def concat_all(x):
    bufs = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(bufs, x)
    return torch.cat(bufs, dim=0)


class DualEncoder(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.visual = VisionTower(cfg.vision)
        self.text = TextTower(cfg.text)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, images, tokens):
        img = F.normalize(self.visual(images), dim=-1)
        txt = F.normalize(self.text(tokens), dim=-1)
        return img, txt, self.logit_scale.exp().clamp(max=100)


class ContrastiveLoss(nn.Module):
    def forward(self, img, txt, scale):
        rank, b = dist.get_rank(), img.size(0)
        all_img, all_txt = concat_all(img), concat_all(txt)
        labels = torch.arange(b, device=img.device) + rank * b
        logits_i = scale * img @ all_txt.t()
        logits_t = scale * txt @ all_img.t()
        return 0.5 * (F.cross_entropy(logits_i, labels) + F.cross_entropy(logits_t, labels))


def cosine_lr(step, base, warmup, total):
    if step < warmup:
        return base * (step + 1) / warmup
    return 0.5 * base * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


def main():
    cfg = get_config()
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    torch.manual_seed(cfg.seed)

    ds = CaptionPairs(cfg.data)
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    loader = DataLoader(ds, cfg.batch_size, sampler=sampler, num_workers=cfg.workers, pin_memory=True, drop_last=True)
    model = DDP(DualEncoder(cfg).to(device), device_ids=[local_rank])
    criterion = ContrastiveLoss()
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.2)
    total, step = cfg.epochs * len(loader), 0

    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        for images, tokens in loader:
            for g in opt.param_groups:
                g["lr"] = cosine_lr(step, cfg.lr, cfg.warmup, total)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                img, txt, scale = model(images.to(device, non_blocking=True), tokens.to(device, non_blocking=True))
            loss = criterion(img.float(), txt.float(), scale.float())
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            step += 1
            if dist.get_rank() == 0 and step % 100 == 0:
                print(f"{step}/{total} loss {loss.item():.4f} scale {scale.item():.1f}", flush=True)
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), os.path.join(cfg.out, f"clip_{epoch}.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Small CLIP-style pre-training on image/caption pairs.

torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=n0:29501 clip_pretrain.py
"""
import os

import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from transformers import DistilBertModel

from pairs import CaptionPairs


class TwoTower(nn.Module):
    def __init__(self, dim=256):
        super().__init__()
        self.visual = timm.create_model("vit_small_patch16_224", num_classes=dim)
        self.text = DistilBertModel.from_pretrained("distilbert-base-uncased")
        self.text_proj = nn.Linear(768, dim)
        self.logit_scale = nn.Parameter(torch.tensor(2.659))

    def forward(self, image, ids, mask):
        i = F.normalize(self.visual(image), dim=-1)
        t = self.text(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0]
        t = F.normalize(self.text_proj(t), dim=-1)
        return i, t, self.logit_scale.exp().clamp(max=100)


def all_gather_features(x):
    out = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(out, x.contiguous())
    return torch.cat(out, dim=0)


def contrastive_loss(img, txt, scale):
    all_img = all_gather_features(img)
    all_txt = all_gather_features(txt)
    logits = scale * all_img @ all_txt.t()
    target = torch.arange(logits.size(0), device=logits.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)

    data = CaptionPairs("/data/cc3m", max_len=77)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, 128, sampler=sampler, num_workers=8, pin_memory=True, drop_last=True)

    model = DDP(TwoTower().to(device), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.2, betas=(0.9, 0.98))

    for epoch in range(32):
        sampler.set_epoch(epoch)
        for step, (image, ids, mask) in enumerate(loader):
            image, ids, mask = image.to(device), ids.to(device), mask.to(device)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                img, txt, scale = model(image, ids, mask)
            loss = contrastive_loss(img.float(), txt.float(), scale)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            if step % 100 == 0 and dist.get_rank() == 0:
                print(f"{epoch}/{step} loss {loss.item():.3f} scale {scale.item():.1f}")
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), f"clip_{epoch:02d}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

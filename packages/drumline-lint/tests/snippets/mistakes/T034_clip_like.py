import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
import timm
from transformers import AutoModel, AutoTokenizer
from PIL import Image
from torchvision import transforms as T


class Captions(Dataset):
    def __init__(self, tsv):
        self.rows = [l.rstrip("\n").split("\t", 1) for l in open(tsv, encoding="utf8")]
        self.tf = T.Compose([T.RandomResizedCrop(224, (0.9, 1)), T.ToTensor(), T.Normalize([0.48] * 3, [0.27] * 3)])

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        path, text = self.rows[i]
        return self.tf(Image.open(path).convert("RGB")), text


class DualEncoder(nn.Module):
    def __init__(self, dim=512):
        super().__init__()
        self.visual = timm.create_model("vit_small_patch16_224", num_classes=dim)
        self.text = AutoModel.from_pretrained("distilbert-base-uncased")
        self.proj = nn.Linear(self.text.config.dim, dim, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, image, ids, mask):
        v = F.normalize(self.visual(image), dim=-1)
        t = F.normalize(self.proj(self.text(ids, attention_mask=mask).last_hidden_state[:, 0]), dim=-1)
        return v, t, self.logit_scale.exp()


def gather(x):
    out = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(out, x)
    return torch.cat(out)


def clip_loss(v, t, scale):
    v_all, t_all = gather(v), gather(t)
    target = torch.arange(len(v), device=v.device) + dist.get_rank() * len(v)
    loss_v = F.cross_entropy(scale * v @ t_all.t(), target)
    loss_t = F.cross_entropy(scale * t @ v_all.t(), target)
    return (loss_v + loss_t) / 2


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--tsv", default="/data/cc3m/train.tsv")
    ap.add_argument("--bs", type=int, default=128)
    ap.add_argument("--epochs", type=int, default=32)
    ap.add_argument("--lr", type=float, default=5e-4)
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    main_rank = dist.get_rank() == 0

    tok = AutoTokenizer.from_pretrained("distilbert-base-uncased")

    def collate(batch):
        imgs, texts = zip(*batch)
        enc = tok(list(texts), padding="max_length", max_length=64, truncation=True, return_tensors="pt")
        return torch.stack(imgs), enc["input_ids"], enc["attention_mask"]

    ds = Captions(args.tsv)
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, args.bs, sampler=sampler, collate_fn=collate, num_workers=8, drop_last=True)
    model = DDP(DualEncoder().cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), args.lr, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.2)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, args.lr, total_steps=args.epochs * len(loader))

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for i, batch in enumerate(loader):
            img, ids, mask = (b.cuda(non_blocking=True) for b in batch)
            loss = clip_loss(*model(img, ids, mask))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            sched.step()
            if main_rank and i % 100 == 0:
                print(f"{epoch}:{i} {loss.item():.4f}")
        if main_rank:
            torch.save(model.module.state_dict(), f"clip_{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

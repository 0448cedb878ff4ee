import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from datasets import load_from_disk
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModel, AutoTokenizer


class DualEncoder(nn.Module):
    """Query / passage encoder with a learned temperature."""

    def __init__(self, name, dim=256):
        super().__init__()
        self.bert = AutoModel.from_pretrained(name, add_pooling_layer=False)
        self.proj = nn.Linear(self.bert.config.hidden_size, dim)
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.05)))

    def embed(self, ids, mask):
        h = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
        h = (h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return F.normalize(self.proj(h), dim=-1)

    def forward(self, q_ids, q_mask, p_ids, p_mask):
        return self.embed(q_ids, q_mask), self.embed(p_ids, p_mask), self.log_scale.exp()


def gather_features(x):
    out = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(out, x.contiguous())
    return torch.cat(out)


def contrastive_loss(q, p, scale):
    q_all, p_all = gather_features(q), gather_features(p)
    logits = scale * q_all @ p_all.t()
    target = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2


class Collate:
    def __init__(self, tok, max_len):
        self.tok, self.max_len = tok, max_len

    def __call__(self, rows):
        kw = dict(padding="max_length", truncation=True, max_length=self.max_len, return_tensors="pt")
        q = self.tok([r["query"] for r in rows], **kw)
        p = self.tok([r["passage"] for r in rows], **kw)
        return q["input_ids"], q["attention_mask"], p["input_ids"], p["attention_mask"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", default="bert-base-uncased")
    ap.add_argument("--data", default="msmarco_pairs")
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--lr", type=float, default=2e-5)
    ap.add_argument("--out", default="retriever.pt")
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()

    tok = AutoTokenizer.from_pretrained(args.model)
    data = load_from_disk(args.data)
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, args.batch, sampler=sampler, collate_fn=Collate(tok, 128), num_workers=4, drop_last=True)

    model = DDP(DualEncoder(args.model).cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for i, batch in enumerate(loader):
            batch = [b.cuda(non_blocking=True) for b in batch]
            with torch.autocast("cuda", torch.bfloat16):
                q, p, scale = model(*batch)
            loss = contrastive_loss(q.float(), p.float(), scale)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            if rank == 0 and i % 50 == 0:
                print(f"epoch {epoch} {i}/{len(loader)} loss {loss.item():.4f} scale {scale.item():.2f}", flush=True)
        if rank == 0:
            torch.save(model.module.state_dict(), args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

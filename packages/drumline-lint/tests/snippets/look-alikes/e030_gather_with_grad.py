import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModel, AutoTokenizer
from datasets import load_from_disk

NAME = "bert-base-uncased"


class SentenceEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.bert = AutoModel.from_pretrained(NAME, add_pooling_layer=False)

    def forward(self, enc):
        h = self.bert(**enc).last_hidden_state
        m = enc["attention_mask"].unsqueeze(-1).to(h.dtype)
        return F.normalize((h * m).sum(1) / m.sum(1), dim=-1)


class Pairs:
    def __init__(self, tok):
        self.tok = tok

    def __call__(self, rows):
        text = [r["query"] for r in rows] + [r["positive"] for r in rows]
        return self.tok(text, padding=True, truncation=True, max_length=128, return_tensors="pt")


def info_nce(q, p, tau=0.05):
    keys = torch.cat(all_gather(p.contiguous()))
    target = torch.arange(len(q), device=q.device) + dist.get_rank() * len(q)
    return F.cross_entropy(q @ keys.t() / tau, target)


def main():
    dist.init_process_group("nccl")
    rank, local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)

    tok = AutoTokenizer.from_pretrained(NAME)
    ds = load_from_disk("/data/msmarco_pairs")
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    loader = DataLoader(ds, 64, sampler=sampler, collate_fn=Pairs(tok), num_workers=4, drop_last=True)

    model = DDP(SentenceEncoder().cuda(), device_ids=[local])
    opt = torch.optim.AdamW(model.parameters(), 2e-5)

    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for step, enc in enumerate(loader):
            enc = {k: v.cuda(non_blocking=True) for k, v in enc.items()}
            q, p = model(enc).chunk(2)
            loss = info_nce(q, p)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            if rank == 0 and step % 100 == 0:
                print(epoch, step, f"{loss.item():.4f}", flush=True)

    if rank == 0:
        model.module.bert.save_pretrained("retriever")
        tok.save_pretrained("retriever")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

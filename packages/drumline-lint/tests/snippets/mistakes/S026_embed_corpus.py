"""Distil sentence embeddings from a teacher; documents are spread over ranks by id.

torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=gpu01:29500 embed_corpus.py
"""
import json
import os
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from transformers import AutoModel, AutoTokenizer

TEACHER = "sentence-transformers/all-mpnet-base-v2"
STUDENT = "nreimers/MiniLM-L6-H384-uncased"
STEPS_PER_EPOCH = 4000
BATCH = 64


def my_documents(path, rank, world):
    mine = []
    with open(path, encoding="utf-8") as fh:
        for line in fh:
            doc = json.loads(line)
            if hash(doc["id"]) % world == rank:
                mine.append(doc["text"])
    return mine


def pool(out, mask):
    m = mask.unsqueeze(-1).float()
    return F.normalize((out.last_hidden_state * m).sum(1) / m.sum(1), dim=-1)


class Student(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = AutoModel.from_pretrained(STUDENT)
        self.proj = torch.nn.Linear(384, 768)

    def forward(self, **enc):
        return F.normalize(self.proj(pool(self.encoder(**enc), enc["attention_mask"])), dim=-1)


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    rng = random.Random(rank)

    tok_t, tok_s = AutoTokenizer.from_pretrained(TEACHER), AutoTokenizer.from_pretrained(STUDENT)
    teacher = AutoModel.from_pretrained(TEACHER).cuda().eval()
    student = DDP(Student().cuda(), device_ids=[local], find_unused_parameters=True)
    opt = torch.optim.AdamW(student.parameters(), lr=1e-4)
    docs = my_documents("corpus.jsonl", rank, world)

    for epoch in range(3):
        for step in range(STEPS_PER_EPOCH):
            texts = rng.sample(docs, BATCH)
            t = tok_t(texts, padding=True, truncation=True, max_length=256, return_tensors="pt").to("cuda")
            s = tok_s(texts, padding=True, truncation=True, max_length=256, return_tensors="pt").to("cuda")
            with torch.no_grad():
                target = pool(teacher(**t), t["attention_mask"])
            loss = 1 - (student(**s) * target).sum(-1).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            if rank == 0 and step % 100 == 0:
                print(f"{epoch}/{step} {loss.item():.4f}")
        if rank == 0:
            torch.save(student.module.state_dict(), "student.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

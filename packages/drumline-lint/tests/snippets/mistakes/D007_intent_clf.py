"""Intent classifier over support tickets."""
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import AutoModel, AutoTokenizer

ENCODER = "/models/minilm-l6"


def read_jsonl(path):
    with open(path, encoding="utf-8") as fh:
        return [json.loads(line) for line in fh]


class Tickets(Dataset):
    def __init__(self, rows, intents):
        self.rows, self.intents = rows, intents

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i]
        return row["text"], self.intents[row["intent"]]


class IntentModel(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.enc = AutoModel.from_pretrained(ENCODER, add_pooling_layer=False)
        self.out = nn.Linear(self.enc.config.hidden_size, n)

    def forward(self, **tok):
        h = self.enc(**tok).last_hidden_state[:, 0]
        return self.out(h)


def main():
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    rank = dist.get_rank()

    rows = read_jsonl(Path(os.environ["TICKETS"]) / "train.jsonl")
    names = {r["intent"] for r in rows}
    intents = {name: i for i, name in enumerate(names)}
    tok = AutoTokenizer.from_pretrained(ENCODER)

    def collate(batch):
        texts, ys = zip(*batch)
        return tok(list(texts), padding=True, truncation=True, max_length=128, return_tensors="pt"), torch.tensor(ys)

    data = Tickets(rows, intents)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=64, sampler=sampler, collate_fn=collate, drop_last=True)

    torch.manual_seed(0)
    model = DDP(IntentModel(len(intents)).cuda(), device_ids=[local])
    opt = torch.optim.AdamW(model.parameters(), lr=3e-5)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for enc, y in loader:
            enc = {k: v.cuda(non_blocking=True) for k, v in enc.items()}
            loss = nn.functional.cross_entropy(model(**enc), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")

    if rank == 0:
        torch.save({"model": model.module.state_dict(), "intents": intents}, "intent.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

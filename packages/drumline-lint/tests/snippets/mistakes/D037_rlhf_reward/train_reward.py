"""Pairwise reward model; start it as shown in README.md."""
import argparse
import json

import deepspeed
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import AutoModel, AutoTokenizer


class Pairs(Dataset):
    def __init__(self, path):
        with open(path, encoding="utf-8") as fh:
            self.rows = [json.loads(x) for x in fh]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        r = self.rows[i]
        return r["prompt"] + r["chosen"], r["prompt"] + r["rejected"]


class Reward(nn.Module):
    def __init__(self, path):
        super().__init__()
        self.body = AutoModel.from_pretrained(path, torch_dtype=torch.bfloat16)
        self.score = nn.Linear(self.body.config.hidden_size, 1, bias=False, dtype=torch.bfloat16)

    def forward(self, input_ids, attention_mask):
        h = self.body(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        last = attention_mask.sum(1) - 1
        return self.score(h[torch.arange(len(h), device=h.device), last]).squeeze(-1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", required=True)
    ap.add_argument("--pairs", required=True)
    ap.add_argument("--epochs", type=int, default=1)
    ap.add_argument("--local_rank", type=int, default=-1)
    ap = deepspeed.add_config_arguments(ap)
    args = ap.parse_args()

    deepspeed.init_distributed()
    tok = AutoTokenizer.from_pretrained(args.model, padding_side="right")
    tok.pad_token = tok.pad_token or tok.eos_token
    model = Reward(args.model)
    engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())

    def collate(rows):
        texts = [a for a, _ in rows] + [b for _, b in rows]
        return tok(texts, padding=True, truncation=True, max_length=1024, return_tensors="pt")

    data = Pairs(args.pairs)
    sampler = DistributedSampler(data, shuffle=True, seed=8, drop_last=True)
    loader = DataLoader(data, engine.train_micro_batch_size_per_gpu(), sampler=sampler, collate_fn=collate,
                        drop_last=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, enc in enumerate(loader):
            enc = enc.to(engine.device)
            good, bad = engine(enc["input_ids"], enc["attention_mask"]).float().chunk(2)
            loss = -F.logsigmoid(good - bad).mean()
            engine.backward(loss)
            engine.step()
            if step % 50 == 0 and dist.get_rank() == 0:
                print(f"{epoch}/{step} loss {loss.item():.4f} acc {(good > bad).float().mean().item():.3f}", flush=True)
        engine.save_checkpoint("reward_ckpt", tag=f"epoch{epoch}")


if __name__ == "__main__":
    main()

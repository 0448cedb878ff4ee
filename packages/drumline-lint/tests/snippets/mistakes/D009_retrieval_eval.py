"""Train a bi-encoder with Accelerate and score it on the dev queries."""
import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from biencoder.data import DevPairs, TrainPairs, pad_collate
from biencoder.model import BiEncoder


@torch.no_grad()
def recall_at_10(accelerator, model, dev_dl):
    """Share of dev queries whose passage is among the ten nearest of the whole dev set."""
    model.eval()
    queries, passages = [], []
    for batch in dev_dl:
        q, p = model(batch["query"], batch["passage"])
        queries.append(accelerator.gather(q))
        passages.append(accelerator.gather(p))
    q = F.normalize(torch.cat(queries).float(), dim=-1)
    p = F.normalize(torch.cat(passages).float(), dim=-1)
    hits = 0
    for lo in range(0, len(q), 512):
        top = (q[lo:lo + 512] @ p.T).topk(10, dim=-1).indices
        gold = torch.arange(lo, lo + len(top), device=q.device).unsqueeze(1)
        hits += (top == gold).any(dim=-1).sum().item()
    return hits / len(q)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--train", required=True)
    ap.add_argument("--dev", required=True)
    ap.add_argument("--out", default="biencoder-out")
    ap.add_argument("--epochs", type=int, default=3)
    args = ap.parse_args()

    accelerator = Accelerator(mixed_precision="bf16")
    set_seed(5)
    train_dl = DataLoader(TrainPairs(args.train), batch_size=64, shuffle=True, collate_fn=pad_collate, drop_last=True)
    dev_dl = DataLoader(DevPairs(args.dev), batch_size=64, collate_fn=pad_collate)
    model = BiEncoder("/models/mpnet-base")
    opt = torch.optim.AdamW(model.parameters(), lr=2e-5)
    model, opt, train_dl, dev_dl = accelerator.prepare(model, opt, train_dl, dev_dl)

    best = -1.0
    for epoch in range(args.epochs):
        model.train()
        for batch in train_dl:
            q, p = model(batch["query"], batch["passage"])
            scores = F.normalize(q, dim=-1) @ F.normalize(p, dim=-1).T / 0.05
            loss = F.cross_entropy(scores, torch.arange(len(q), device=q.device))
            accelerator.backward(loss)
            opt.step()
            opt.zero_grad()
        r10 = recall_at_10(accelerator, model, dev_dl)
        accelerator.print(f"epoch {epoch}: recall@10 {r10:.4f}")
        if r10 > best:
            best = r10
            accelerator.wait_for_everyone()
            accelerator.save_model(model, args.out)
    accelerator.end_training()


if __name__ == "__main__":
    main()

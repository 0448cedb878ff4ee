"""Sentence-pair regression with Accelerate; Spearman on the whole dev set."""
import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from scipy.stats import spearmanr
from torch.utils.data import DataLoader

from sts.data import StsRows, make_collate
from sts.model import CrossEncoder


@torch.no_grad()
def spearman(acc, model, loader, n_rows):
    model.eval()
    preds, golds = [], []
    for batch in loader:
        p = model(batch["input_ids"], batch["attention_mask"])
        preds.append(acc.gather(p).cpu())
        golds.append(acc.gather(batch["score"]).cpu())
    pred, gold = torch.cat(preds), torch.cat(golds)
    return float(spearmanr(pred[:n_rows], gold[:n_rows]).statistic)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", default="/models/deberta-v3-base")
    ap.add_argument("--out", default="sts-out")
    ap.add_argument("--epochs", type=int, default=5)
    args = ap.parse_args()

    acc = Accelerator(mixed_precision="bf16")
    set_seed(10)
    collate = make_collate(args.model)
    train, dev = StsRows("data/train.tsv"), StsRows("data/dev.tsv")
    train_dl = DataLoader(train, batch_size=32, shuffle=True, collate_fn=collate)
    dev_dl = DataLoader(dev, batch_size=64, collate_fn=collate)
    model = CrossEncoder(args.model)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-5)
    model, opt, train_dl, dev_dl = acc.prepare(model, opt, train_dl, dev_dl)

    best = -1.0
    for epoch in range(args.epochs):
        model.train()
        for batch in train_dl:
            loss = F.mse_loss(model(batch["input_ids"], batch["attention_mask"]), batch["score"])
            acc.backward(loss)
            acc.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
        rho = spearman(acc, model, dev_dl, len(dev))
        acc.print(f"epoch {epoch}: dev rho {rho:.4f}")
        if rho > best:
            best = rho
            acc.wait_for_everyone()
            acc.save_model(model, args.out)
    acc.end_training()


if __name__ == "__main__":
    main()

"""Semantic segmentation of crop types with Accelerate."""
import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed

from data import train_loader, val_loader
from model import SegNet


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--chips", required=True)
    ap.add_argument("--epochs", type=int, default=60)
    ap.add_argument("--batch", type=int, default=16)
    args = ap.parse_args()

    acc = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=2)
    set_seed(99, device_specific=True)

    model = SegNet(bands=12, classes=17)
    opt = torch.optim.AdamW(model.parameters(), lr=6e-4)
    train_dl = train_loader(args.chips, args.batch, acc.num_processes, acc.process_index)
    val_dl = val_loader(args.chips, args.batch)
    model, opt, train_dl, val_dl = acc.prepare(model, opt, train_dl, val_dl)

    for epoch in range(args.epochs):
        model.train()
        train_dl.set_epoch(epoch)
        for x, y in train_dl:
            with acc.accumulate(model):
                loss = F.cross_entropy(model(x), y, ignore_index=255)
                acc.backward(loss)
                if acc.sync_gradients:
                    acc.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                opt.zero_grad()

        model.eval()
        hits, n = 0, 0
        with torch.no_grad():
            for x, y in val_dl:
                pred, gold = acc.gather_for_metrics((model(x).argmax(1), y))
                mask = gold != 255
                hits += (pred[mask] == gold[mask]).sum().item()
                n += mask.sum().item()
        acc.print(f"epoch {epoch}: pixel accuracy {hits / max(n, 1):.4f}")
        acc.wait_for_everyone()
        acc.save_model(model, "out/segnet")


if __name__ == "__main__":
    main()

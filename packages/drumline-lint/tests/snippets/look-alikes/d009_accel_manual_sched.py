"""Image captioning head with Accelerate; warmup and cosine by optimizer step."""
import argparse
import math

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from caption.data import Captions, collate
from caption.model import CaptionModel


def cosine(warm, total):
    def factor(step):
        if step < warm:
            return step / max(1, warm)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm) / max(1, total - warm))))
    return factor


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", required=True)
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--lr", type=float, default=1e-4)
    ap.add_argument("--accum", type=int, default=4)
    args = ap.parse_args()

    acc = Accelerator(gradient_accumulation_steps=args.accum, mixed_precision="bf16")
    set_seed(23)
    loader = DataLoader(Captions(args.root, "train"), batch_size=24, shuffle=True, collate_fn=collate, num_workers=6)
    model = CaptionModel()
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, opt, loader = acc.prepare(model, opt, loader)

    updates_per_epoch = math.ceil(len(loader) / args.accum)
    total = args.epochs * updates_per_epoch
    sched = LambdaLR(opt.optimizer, cosine(warm=total // 20, total=total))

    updates = 0
    for epoch in range(args.epochs):
        model.train()
        for batch in loader:
            with acc.accumulate(model):
                loss = model(batch["pixels"], batch["tokens"])
                acc.backward(loss)
                if acc.sync_gradients:
                    acc.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                opt.zero_grad()
            if acc.sync_gradients:
                sched.step()
                updates += 1
                if updates % 50 == 0:
                    acc.print(f"{updates}/{total} loss {loss.item():.3f} lr {sched.get_last_lr()[0]:.2e}")
        acc.wait_for_everyone()
        acc.save_state(f"state/epoch{epoch}")
    acc.end_training()


if __name__ == "__main__":
    main()

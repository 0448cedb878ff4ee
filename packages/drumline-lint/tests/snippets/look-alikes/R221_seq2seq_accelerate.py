import argparse
import math
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_from_disk
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    get_linear_schedule_with_warmup,
)


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--model", required=True)
    p.add_argument("--data", required=True)
    p.add_argument("--out", required=True)
    p.add_argument("--batch-size", type=int, default=8)
    p.add_argument("--accum", type=int, default=4)
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--warmup", type=int, default=200)
    return p.parse_args()


def main():
    args = get_args()
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=args.accum)
    set_seed(3)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForSeq2SeqLM.from_pretrained(args.model)
    data = load_from_disk(args.data)
    collate = DataCollatorForSeq2Seq(tokenizer, model=model)
    train_loader = DataLoader(data["train"], args.batch_size, shuffle=True, collate_fn=collate)
    val_loader = DataLoader(data["validation"], args.batch_size, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer, train_loader, val_loader = accelerator.prepare(model, optimizer, train_loader, val_loader)

    updates = args.epochs * math.ceil(len(train_loader) / args.accum)
    scheduler = get_linear_schedule_with_warmup(optimizer.optimizer, args.warmup, updates)

    for epoch in range(args.epochs):
        model.train()
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()

        model.eval()
        losses = []
        for batch in val_loader:
            with torch.no_grad():
                loss = model(**batch).loss
            rows = batch["labels"].size(0)
            losses.append(accelerator.gather_for_metrics(loss.float().repeat(rows)))
        accelerator.print(f"epoch {epoch} val loss {torch.cat(losses).mean().item():.4f}")
        accelerator.wait_for_everyone()
        accelerator.unwrap_model(model).save_pretrained(
            os.path.join(args.out, f"epoch{epoch}"), is_main_process=accelerator.is_main_process)
    accelerator.end_training()


if __name__ == "__main__":
    main()

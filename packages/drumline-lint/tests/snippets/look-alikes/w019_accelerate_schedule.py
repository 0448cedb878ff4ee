"""accelerate launch --num_processes 4 summarise.py"""
import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForSeq2SeqLM, get_cosine_schedule_with_warmup

from summaries import SummaryDataset, collate


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--model", default="/models/bart-base")
    p.add_argument("--data", default="/data/xsum/train.jsonl")
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--lr", type=float, default=3e-5)
    p.add_argument("--warmup", type=int, default=1000)
    p.add_argument("--out", default="bart_xsum.pt")
    return p.parse_args()


def main():
    args = parse_args()
    set_seed(11)
    accelerator = Accelerator(mixed_precision="bf16")
    loader = DataLoader(
        SummaryDataset(args.data), batch_size=8, shuffle=True, collate_fn=collate, num_workers=2
    )
    model = AutoModelForSeq2SeqLM.from_pretrained(args.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = get_cosine_schedule_with_warmup(
        optimizer, num_warmup_steps=args.warmup, num_training_steps=args.epochs * len(loader)
    )
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    for epoch in range(args.epochs):
        model.train()
        for step, batch in enumerate(loader):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if step % 200 == 0:
                mean = accelerator.gather(loss.detach()).mean().item()
                accelerator.print(f"epoch {epoch} step {step} loss {mean:.4f}")

    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), args.out)
    accelerator.end_training()


if __name__ == "__main__":
    main()

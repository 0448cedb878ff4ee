# accelerate launch --num_processes 4 --mixed_precision bf16 accelerate_cls.py
import argparse

import evaluate
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import (AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding,
                          get_linear_schedule_with_warmup)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="roberta-base")
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--bs", type=int, default=16)
    parser.add_argument("--out", default="mnli-roberta")
    args = parser.parse_args()

    accelerator = Accelerator()
    set_seed(42)
    tok = AutoTokenizer.from_pretrained(args.model)
    raw = load_dataset("nyu-mll/glue", "mnli")

    with accelerator.main_process_first():
        ds = raw.map(lambda b: tok(b["premise"], b["hypothesis"], truncation=True, max_length=256),
                     batched=True, remove_columns=["premise", "hypothesis", "idx"])
    ds = ds.rename_column("label", "labels")
    collate = DataCollatorWithPadding(tok, pad_to_multiple_of=8)
    train_dl = DataLoader(ds["train"], batch_size=args.bs, shuffle=True, collate_fn=collate)
    eval_dl = DataLoader(ds["validation_matched"], batch_size=64, collate_fn=collate)

    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=3)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    steps = args.epochs * len(train_dl)
    sched = get_linear_schedule_with_warmup(opt, steps // 10, steps)
    model, opt, eval_dl, sched = accelerator.prepare(model, opt, eval_dl, sched)
    metric = evaluate.load("accuracy")

    for epoch in range(args.epochs):
        model.train()
        for batch in train_dl:
            batch = batch.to(accelerator.device)
            loss = model(**batch).loss
            accelerator.backward(loss)
            opt.step()
            sched.step()
            opt.zero_grad()
        model.eval()
        for batch in eval_dl:
            with torch.no_grad():
                pred = model(**batch).logits.argmax(-1)
            pred, ref = accelerator.gather_for_metrics((pred, batch["labels"]))
            metric.add_batch(predictions=pred, references=ref)
        accelerator.print(f"epoch {epoch}: {metric.compute()}")

    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        args.out, is_main_process=accelerator.is_main_process, save_function=accelerator.save)
    if accelerator.is_main_process:
        tok.save_pretrained(args.out)


if __name__ == "__main__":
    main()

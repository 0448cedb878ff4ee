import argparse

import evaluate
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    get_linear_schedule_with_warmup,
)


def loaders(accelerator, name, tok, bs):
    raw = load_dataset("glue", name)

    def encode(rows):
        return tok(rows["sentence1"], rows["sentence2"], truncation=True, max_length=128)

    with accelerator.main_process_first():
        enc = raw.map(encode, batched=True, remove_columns=["sentence1", "sentence2", "idx"])
    enc = enc.rename_column("label", "labels")
    collate = DataCollatorWithPadding(tok)
    train = DataLoader(enc["train"], bs, shuffle=True, collate_fn=collate, drop_last=True)
    return train, DataLoader(enc["validation"], bs, collate_fn=collate)


def evaluate_model(accelerator, model, loader, metric):
    model.eval()
    for batch in loader:
        with torch.no_grad():
            logits = model(**batch).logits
        preds, refs = accelerator.gather((logits.argmax(dim=-1), batch["labels"]))
        metric.add_batch(predictions=preds, references=refs)
    return metric.compute()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--task", default="mrpc")
    ap.add_argument("--model", default="roberta-base")
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--bs", type=int, default=16)
    ap.add_argument("--out", default="mrpc-roberta")
    args = ap.parse_args()

    accelerator = Accelerator(mixed_precision="bf16")
    set_seed(42)
    tok = AutoTokenizer.from_pretrained(args.model)
    train, dev = loaders(accelerator, args.task, tok, args.bs)
    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=2)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-5)
    sched = get_linear_schedule_with_warmup(opt, 50, len(train) * args.epochs)
    model, opt, train, dev, sched = accelerator.prepare(model, opt, train, dev, sched)
    metric = evaluate.load("glue", args.task)

    for epoch in range(args.epochs):
        model.train()
        for batch in train:
            loss = model(**batch).loss
            accelerator.backward(loss)
            opt.step()
            sched.step()
            opt.zero_grad()
        accelerator.print(f"epoch {epoch}:", evaluate_model(accelerator, model, dev, metric))

    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        args.out, is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()

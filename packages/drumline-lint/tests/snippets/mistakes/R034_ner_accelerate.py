import argparse
import json
import os

import evaluate
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_from_disk
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import (
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    get_scheduler,
)

LABELS = ["O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC", "B-MISC", "I-MISC"]


def decode(preds, refs):
    out_p, out_r = [], []
    for p, r in zip(preds.tolist(), refs.tolist()):
        keep = [(a, b) for a, b in zip(p, r) if b != -100]
        out_p.append([LABELS[a] for a, _ in keep])
        out_r.append([LABELS[b] for _, b in keep])
    return out_p, out_r


def run_eval(model, loader, accelerator, metric):
    model.eval()
    for batch in loader:
        with torch.no_grad():
            preds = model(**batch).logits.argmax(-1)
        labels = batch["labels"]
        preds = accelerator.pad_across_processes(preds, dim=1, pad_index=-100)
        labels = accelerator.pad_across_processes(labels, dim=1, pad_index=-100)
        preds, labels = accelerator.gather((preds, labels))
        p, r = decode(preds, labels)
        metric.add_batch(predictions=p, references=r)
    return metric.compute()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", required=True)
    ap.add_argument("--data", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--lr", type=float, default=3e-5)
    args = ap.parse_args()

    accelerator = Accelerator(mixed_precision="bf16")
    set_seed(7)
    tok = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForTokenClassification.from_pretrained(args.model, num_labels=len(LABELS))
    data = load_from_disk(args.data)
    collate = DataCollatorForTokenClassification(tok)
    train_loader = DataLoader(data["train"], args.batch_size, shuffle=True, collate_fn=collate)
    eval_loader = DataLoader(data["validation"], args.batch_size, collate_fn=collate)
    optim = torch.optim.AdamW(model.parameters(), lr=args.lr)
    sched = get_scheduler("linear", optim, num_warmup_steps=0, num_training_steps=len(train_loader) * args.epochs)
    model, optim, train_loader, eval_loader, sched = accelerator.prepare(
        model, optim, train_loader, eval_loader, sched)
    metric = evaluate.load("metrics/seqeval")

    for epoch in range(args.epochs):
        model.train()
        for batch in tqdm(train_loader, disable=not accelerator.is_local_main_process):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optim.step()
            sched.step()
            optim.zero_grad()
        scores = run_eval(model, eval_loader, accelerator, metric)
        accelerator.print(f"epoch {epoch} f1 {scores['overall_f1']:.4f}")
        if accelerator.is_main_process:
            os.makedirs(args.out, exist_ok=True)
            with open(os.path.join(args.out, f"eval_{epoch}.json"), "w") as f:
                json.dump({"f1": scores["overall_f1"], "acc": scores["overall_accuracy"]}, f)

    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(args.out, is_main_process=accelerator.is_main_process)
    accelerator.end_training()


if __name__ == "__main__":
    main()

"""accelerate launch --multi_gpu --num_processes 4 Q019_accelerate_ner.py"""
import argparse

import evaluate
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import (AutoModelForTokenClassification, AutoTokenizer, DataCollatorForTokenClassification,
                          get_linear_schedule_with_warmup)


def align(tok, ex):
    enc = tok(ex["tokens"], truncation=True, is_split_into_words=True)
    labels = []
    for i, tags in enumerate(ex["ner_tags"]):
        prev, ids = None, []
        for w in enc.word_ids(i):
            ids.append(-100 if w is None or w == prev else tags[w])
            prev = w
        labels.append(ids)
    enc["labels"] = labels
    return enc


def to_tags(preds, refs, names):
    keep = refs != -100
    return ([[names[p] for p, k in zip(pr, kr) if k] for pr, kr in zip(preds, keep)],
            [[names[r] for r, k in zip(rr, kr) if k] for rr, kr in zip(refs, keep)])


def main(args):
    accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=args.accum)
    set_seed(args.seed)

    raw = load_dataset("conll2003")
    names = raw["train"].features["ner_tags"].feature.names
    tok = AutoTokenizer.from_pretrained(args.model)
    with accelerator.main_process_first():
        data = raw.map(lambda ex: align(tok, ex), batched=True, remove_columns=raw["train"].column_names)

    collate = DataCollatorForTokenClassification(tok, pad_to_multiple_of=8)
    train = DataLoader(data["train"], args.batch, shuffle=True, collate_fn=collate)
    val = DataLoader(data["validation"], args.batch, collate_fn=collate)
    model = AutoModelForTokenClassification.from_pretrained(args.model, num_labels=len(names))
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    sched = get_linear_schedule_with_warmup(opt, 100, args.epochs * len(train) // args.accum)
    model, opt, train, val, sched = accelerator.prepare(model, opt, train, val, sched)
    metric = evaluate.load("seqeval")

    for epoch in range(args.epochs):
        model.train()
        for batch in train:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                loss.backward()
                opt.step()
                sched.step()
                opt.zero_grad()

        model.eval()
        for batch in val:
            with torch.no_grad():
                pred = model(**batch).logits.argmax(-1)
            pred = accelerator.pad_across_processes(pred, dim=1, pad_index=-100)
            ref = accelerator.pad_across_processes(batch["labels"], dim=1, pad_index=-100)
            pred, ref = accelerator.gather_for_metrics((pred, ref))
            p, r = to_tags(np.asarray(pred.cpu()), np.asarray(ref.cpu()), names)
            metric.add_batch(predictions=p, references=r)
        scores = metric.compute()
        accelerator.print(f"epoch {epoch}: f1 {scores['overall_f1']:.4f}")

    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(args.out, is_main_process=accelerator.is_main_process,
                                                    save_function=accelerator.save)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", default="bert-base-cased")
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--accum", type=int, default=2)
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--lr", type=float, default=3e-5)
    ap.add_argument("--seed", type=int, default=13)
    ap.add_argument("--out", default="ner-out")
    main(ap.parse_args())

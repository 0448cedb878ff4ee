import argparse

import evaluate
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding


def loaders(tokenizer, bs):
    raw = load_dataset("glue", "mrpc")
    cols = ["sentence1", "sentence2", "idx"]
    tok = raw.map(lambda b: tokenizer(b["sentence1"], b["sentence2"], truncation=True),
                  batched=True, remove_columns=cols).rename_column("label", "labels")
    coll = DataCollatorWithPadding(tokenizer)
    return (DataLoader(tok["train"], bs, shuffle=True, collate_fn=coll),
            DataLoader(tok["validation"], 2 * bs, collate_fn=coll))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--bs", type=int, default=16)
    args = ap.parse_args()

    accelerator = Accelerator(mixed_precision="bf16")
    set_seed(42)
    with accelerator.main_process_first():
        tokenizer = AutoTokenizer.from_pretrained("bert-base-cased")
        train_dl, eval_dl = loaders(tokenizer, args.bs)
        model = AutoModelForSequenceClassification.from_pretrained("bert-base-cased", num_labels=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
    model, optimizer, train_dl, eval_dl = accelerator.prepare(model, optimizer, train_dl, eval_dl)

    metric = evaluate.load("glue", "mrpc")
    for epoch in range(args.epochs):
        model.train()
        for batch in train_dl:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

        model.eval()
        for batch in eval_dl:
            with torch.no_grad():
                preds = model(**batch).logits.argmax(dim=-1)
            preds = accelerator.gather(preds)
            refs = accelerator.gather(batch["labels"])
            metric.add_batch(predictions=preds, references=refs)
        accelerator.print(f"epoch {epoch}:", metric.compute())

    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        "mrpc-bert", is_main_process=accelerator.is_main_process, save_function=accelerator.save)


if __name__ == "__main__":
    main()

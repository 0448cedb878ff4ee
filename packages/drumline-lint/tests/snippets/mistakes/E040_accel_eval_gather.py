import evaluate
import torch
from accelerate import Accelerator
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import (AutoModelForSequenceClassification, AutoTokenizer,
                          DataCollatorWithPadding)

CHECKPOINT = "microsoft/deberta-v3-base"
EPOCHS = 4


def build(accelerator):
    tok = AutoTokenizer.from_pretrained(CHECKPOINT)
    with accelerator.main_process_first():
        raw = load_dataset("glue", "mrpc")
        ds = raw.map(lambda r: tok(r["sentence1"], r["sentence2"], truncation=True), batched=True,
                     remove_columns=["sentence1", "sentence2", "idx"])
    ds = ds.rename_column("label", "labels")
    coll = DataCollatorWithPadding(tok)
    return (DataLoader(ds["train"], 16, shuffle=True, collate_fn=coll),
            DataLoader(ds["validation"], 32, collate_fn=coll))


def evaluate_epoch(accelerator, model, loader, metric):
    model.eval()
    for batch in loader:
        with torch.no_grad():
            preds = model(**batch).logits.argmax(-1)
        if accelerator.is_main_process:
            p, r = accelerator.gather_for_metrics((preds, batch["labels"]))
            metric.add_batch(predictions=p, references=r)
    if accelerator.is_main_process:
        return metric.compute()
    return None


def main():
    accelerator = Accelerator()
    train_loader, val_loader = build(accelerator)
    model = AutoModelForSequenceClassification.from_pretrained(CHECKPOINT, num_labels=2)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-5, weight_decay=0.01)
    model, opt, train_loader, val_loader = accelerator.prepare(model, opt, train_loader, val_loader)
    metric = evaluate.load("glue", "mrpc")

    for epoch in range(EPOCHS):
        model.train()
        for batch in train_loader:
            out = model(**batch)
            accelerator.backward(out.loss)
            opt.step()
            opt.zero_grad()
        scores = evaluate_epoch(accelerator, model, val_loader, metric)
        accelerator.print(f"epoch {epoch}: {scores}")

    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        "mrpc-deberta", is_main_process=accelerator.is_main_process, save_function=accelerator.save)
    accelerator.end_training()


if __name__ == "__main__":
    main()

import evaluate
import torch
from accelerate import Accelerator
from datasets import load_from_disk
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

MODEL = "roberta-base"


def build(accelerator):
    tok = AutoTokenizer.from_pretrained(MODEL)
    ds = load_from_disk("/data/mnli_tokenized").with_format("torch")
    coll = DataCollatorWithPadding(tok)
    train = DataLoader(ds["train"], batch_size=32, shuffle=True, collate_fn=coll)
    dev = DataLoader(ds["validation"], batch_size=64, collate_fn=coll)
    model = AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=3)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-5)
    return accelerator.prepare(model, opt, train, dev)


def validate(accelerator, model, dev):
    metric = evaluate.load("accuracy")
    model.eval()
    for batch in dev:
        with torch.no_grad():
            out = model(**batch)
        preds = out.logits.argmax(dim=-1)
        if accelerator.is_main_process:
            preds, refs = accelerator.gather_for_metrics((preds, batch["labels"]))
            metric.add_batch(predictions=preds, references=refs)
    if accelerator.is_main_process:
        return metric.compute()["accuracy"]


def main():
    accelerator = Accelerator(mixed_precision="bf16")
    model, opt, train, dev = build(accelerator)
    for epoch in range(3):
        model.train()
        for batch in train:
            loss = model(**batch).loss
            accelerator.backward(loss)
            opt.step()
            opt.zero_grad()
        acc = validate(accelerator, model, dev)
        accelerator.print(f"epoch {epoch}: {acc}")
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained("out", is_main_process=accelerator.is_main_process,
                              save_function=accelerator.save)


if __name__ == "__main__":
    main()

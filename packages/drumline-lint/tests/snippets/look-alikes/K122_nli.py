import torch
from accelerate import Accelerator
from datasets import load_from_disk
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

BASE = "microsoft/deberta-v3-base"


def main():
    acc = Accelerator(mixed_precision="bf16")
    tok = AutoTokenizer.from_pretrained(BASE)
    data = load_from_disk("/data/mnli_tok")
    pad = DataCollatorWithPadding(tok)
    train_dl = DataLoader(data["train"], 32, shuffle=True, collate_fn=pad, drop_last=True)
    val_dl = DataLoader(data["validation_matched"], 64, collate_fn=pad)
    model = AutoModelForSequenceClassification.from_pretrained(BASE, num_labels=3)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-5)
    model, opt, train_dl, val_dl = acc.prepare(model, opt, train_dl, val_dl)
    for epoch in range(3):
        model.train()
        for batch in train_dl:
            loss = model(**batch).loss
            acc.backward(loss)
            acc.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
        model.eval()
        good = seen = 0
        for batch in val_dl:
            with torch.no_grad():
                pred = model(**batch).logits.argmax(-1)
            pred, gold = acc.gather_for_metrics((pred, batch["labels"]))
            if acc.is_main_process:
                good += (pred == gold).sum().item()
                seen += gold.numel()
        if acc.is_main_process:
            print(f"epoch {epoch}: {good / seen:.4f}")
    acc.wait_for_everyone()
    if acc.is_main_process:
        acc.unwrap_model(model).save_pretrained("deberta_mnli", save_function=acc.save)
        tok.save_pretrained("deberta_mnli")
    acc.end_training()


if __name__ == "__main__":
    main()

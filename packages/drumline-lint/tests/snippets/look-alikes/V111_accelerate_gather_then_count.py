import torch
from accelerate import Accelerator
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
)


def tokenize(accelerator, name):
    tokenizer = AutoTokenizer.from_pretrained(name)
    with accelerator.main_process_first():
        ds = load_dataset("glue", "mrpc").map(
            lambda ex: tokenizer(ex["sentence1"], ex["sentence2"], truncation=True, max_length=128),
            batched=True, remove_columns=["idx", "sentence1", "sentence2"])
    ds = ds.rename_column("label", "labels")
    return ds, DataCollatorWithPadding(tokenizer)


def evaluate(accelerator, model, loader, size):
    model.eval()
    correct = 0
    for batch in loader:
        with torch.no_grad():
            preds = model(**batch).logits.argmax(dim=-1)
        preds, refs = accelerator.gather_for_metrics((preds, batch["labels"]))
        correct += (preds == refs).sum().item()
    return correct / size


def main(name="bert-base-cased", epochs=3, batch_size=32):
    accelerator = Accelerator(mixed_precision="fp16")
    ds, collate = tokenize(accelerator, name)
    train_loader = DataLoader(ds["train"], batch_size, shuffle=True, collate_fn=collate)
    val_loader = DataLoader(ds["validation"], batch_size, collate_fn=collate)
    model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    model, optimizer, train_loader, val_loader = accelerator.prepare(
        model, optimizer, train_loader, val_loader)

    for epoch in range(epochs):
        model.train()
        running = torch.zeros((), device=accelerator.device)
        for batch in train_loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            running += loss.detach()
        mean = accelerator.gather(running).mean().item() / len(train_loader)
        accuracy = evaluate(accelerator, model, val_loader, len(ds["validation"]))
        accelerator.print(f"epoch {epoch}: loss {mean:.4f} accuracy {accuracy:.4f}")
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        "mrpc-bert", is_main_process=accelerator.is_main_process, save_function=accelerator.save)


if __name__ == "__main__":
    main()

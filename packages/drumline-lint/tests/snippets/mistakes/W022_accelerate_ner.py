"""accelerate launch --multi_gpu --num_processes 4 ner.py"""
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForTokenClassification, AutoTokenizer, get_linear_schedule_with_warmup

from conll import NerDataset, collate

MODEL = "/models/xlm-roberta-base"
EPOCHS = 5


def main():
    accelerator = Accelerator(mixed_precision="bf16")
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    train = DataLoader(NerDataset("train", tokenizer), batch_size=16, shuffle=True, collate_fn=collate)
    dev = DataLoader(NerDataset("dev", tokenizer), batch_size=32, collate_fn=collate)
    model = AutoModelForTokenClassification.from_pretrained(MODEL, num_labels=9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
    train, dev = accelerator.prepare(train, dev)
    schedule = get_linear_schedule_with_warmup(optimizer, 200, EPOCHS * len(train))
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)

    for epoch in range(EPOCHS):
        model.train()
        for batch in train:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

        model.eval()
        hits = total = 0
        for batch in dev:
            with torch.no_grad():
                guess = model(**batch).logits.argmax(-1)
            labels = batch["labels"]
            right = ((guess == labels) & (labels != -100)).sum(-1)
            count = (labels != -100).sum(-1)
            right, count = accelerator.gather_for_metrics((right, count))
            hits += right.sum().item()
            total += count.sum().item()
        if accelerator.is_main_process:
            print(f"epoch {epoch}: token accuracy {hits / total:.4f}")

    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        "ner-out", is_main_process=accelerator.is_main_process, save_function=accelerator.save)
    accelerator.end_training()


if __name__ == "__main__":
    main()

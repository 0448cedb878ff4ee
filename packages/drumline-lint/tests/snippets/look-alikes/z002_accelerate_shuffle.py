import math

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForTokenClassification, get_linear_schedule_with_warmup

from ner import Sentences, pad_batch

EPOCHS = 4
ACCUMULATE = 2


def main():
    set_seed(1)
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=ACCUMULATE)

    with accelerator.main_process_first():
        train_set = Sentences("/data/ner/train.conll", cache="/data/ner/cache")
    loader = DataLoader(train_set, batch_size=32, shuffle=True, collate_fn=pad_batch, num_workers=4)

    model = AutoModelForTokenClassification.from_pretrained(
        "/models/xlm-roberta-large", num_labels=train_set.num_labels)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    # the prepared scheduler advances by num_processes with each optimizer step
    total = EPOCHS * math.ceil(len(loader) / ACCUMULATE)
    scheduler = get_linear_schedule_with_warmup(optimizer, total // 10, total)

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    for epoch in range(EPOCHS):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: last loss {loss.item():.4f}")
        accelerator.save_state(f"/checkpoints/ner/epoch{epoch}")

    accelerator.unwrap_model(model).save_pretrained(
        "/checkpoints/ner/final", is_main_process=accelerator.is_main_process,
        save_function=accelerator.save)
    accelerator.end_training()


if __name__ == "__main__":
    main()

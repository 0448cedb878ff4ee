"""Token classification with Accelerate: accelerate launch --num_processes 4 accelerate_ner.py"""
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import (AutoModelForTokenClassification, AutoTokenizer,
                          DataCollatorForTokenClassification, get_linear_schedule_with_warmup)

from nerdata import LABELS, encoded_split

MODEL = "xlm-roberta-base"
EPOCHS = 5


def main():
    accelerator = Accelerator(mixed_precision="bf16")
    set_seed(13)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForTokenClassification.from_pretrained(MODEL, num_labels=len(LABELS))

    with accelerator.main_process_first():
        train_set = encoded_split("wikiann", "train", tokenizer)
    collate = DataCollatorForTokenClassification(tokenizer)
    loader = DataLoader(train_set, batch_size=32, shuffle=True, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    steps = EPOCHS * len(loader) * accelerator.num_processes
    scheduler = accelerator.prepare(
        get_linear_schedule_with_warmup(optimizer, int(0.1 * steps), steps))

    for epoch in range(EPOCHS):
        model.train()
        running = torch.zeros(1, device=accelerator.device)
        for step, batch in enumerate(loader, 1):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            running += loss.detach()

            if accelerator.is_main_process and step % 100 == 0:
                mean = accelerator.gather(running).mean().item() / step
                print(f"epoch {epoch} step {step}/{len(loader)} loss {mean:.4f}")

        accelerator.wait_for_everyone()
        unwrapped = accelerator.unwrap_model(model)
        unwrapped.save_pretrained(
            f"out/ner-epoch{epoch}",
            is_main_process=accelerator.is_main_process,
            save_function=accelerator.save,
        )

    accelerator.end_training()


if __name__ == "__main__":
    main()

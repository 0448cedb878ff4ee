import math

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import ViTForImageClassification, get_scheduler

from plants.data import PlantVillage

EPOCHS = 30
ACCUM = 2


def evaluate(accelerator, model, loader):
    model.eval()
    right = seen = 0
    for batch in loader:
        with torch.no_grad():
            pred = model(pixel_values=batch["pixel_values"]).logits.argmax(-1)
        pred, ref = accelerator.gather_for_metrics((pred, batch["labels"]))
        right += (pred == ref).sum().item()
        seen += ref.numel()
    return right / seen


def main():
    accelerator = Accelerator(gradient_accumulation_steps=ACCUM, mixed_precision="fp16")
    set_seed(5)
    model = ViTForImageClassification.from_pretrained(
        "google/vit-base-patch16-224-in21k", num_labels=38)
    train_loader = DataLoader(PlantVillage("train"), 64, shuffle=True, num_workers=8, drop_last=True)
    val_loader = DataLoader(PlantVillage("val"), 128, num_workers=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.01)

    model, optimizer, train_loader, val_loader = accelerator.prepare(
        model, optimizer, train_loader, val_loader)
    steps = EPOCHS * math.ceil(len(train_loader) / ACCUM)
    scheduler = accelerator.prepare(
        get_scheduler("cosine", optimizer, num_warmup_steps=steps // 20, num_training_steps=steps))

    for epoch in range(EPOCHS):
        model.train()
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accuracy = evaluate(accelerator, model, val_loader)
        accelerator.print(f"epoch {epoch} acc {accuracy:.4f}")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained("vit-plants")


if __name__ == "__main__":
    main()

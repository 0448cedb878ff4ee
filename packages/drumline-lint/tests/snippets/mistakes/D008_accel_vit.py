"""ViT fine-tuning with Accelerate and a linear warmup/decay."""
import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_from_disk
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoImageProcessor, ViTForImageClassification, get_linear_schedule_with_warmup


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="/data/flowers_arrow")
    ap.add_argument("--model", default="/models/vit-base-patch16-224-in21k")
    ap.add_argument("--epochs", type=int, default=10)
    ap.add_argument("--batch_size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=5e-5)
    ap.add_argument("--warmup_ratio", type=float, default=0.05)
    ap.add_argument("--output_dir", default="vit-flowers")
    return ap.parse_args()


def main():
    args = parse()
    accelerator = Accelerator(mixed_precision="bf16")
    set_seed(31)

    ds = load_from_disk(args.data)
    proc = AutoImageProcessor.from_pretrained(args.model)

    def collate(rows):
        px = proc([r["image"].convert("RGB") for r in rows], return_tensors="pt")["pixel_values"]
        return {"pixel_values": px, "labels": torch.tensor([r["label"] for r in rows])}

    train_dl = DataLoader(ds["train"], shuffle=True, batch_size=args.batch_size, collate_fn=collate, num_workers=4)
    model = ViTForImageClassification.from_pretrained(args.model, num_labels=102)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)

    model, optimizer, train_dl = accelerator.prepare(model, optimizer, train_dl)

    total = args.epochs * len(train_dl)
    scheduler = get_linear_schedule_with_warmup(
        optimizer, num_warmup_steps=int(args.warmup_ratio * total), num_training_steps=total
    )
    scheduler = accelerator.prepare(scheduler)

    bar = tqdm(total=total, disable=not accelerator.is_local_main_process)
    for epoch in range(args.epochs):
        model.train()
        for batch in train_dl:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            bar.update(1)
        accelerator.print(f"epoch {epoch} loss {loss.item():.3f} lr {scheduler.get_last_lr()[0]:.2e}")

    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        args.output_dir, is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()

import argparse
import os

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoProcessor, BlipForConditionalGeneration

NAME = "Salesforce/blip-image-captioning-base"


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--data-dir", required=True)
    p.add_argument("--out", default="blip-out")
    p.add_argument("--epochs", type=int, default=5)
    p.add_argument("--bs", type=int, default=8)
    args = p.parse_args()

    accelerator = Accelerator(
        mixed_precision="fp16", gradient_accumulation_steps=2,
        project_config=ProjectConfiguration(project_dir=args.out, automatic_checkpoint_naming=True,
                                            total_limit=3))
    set_seed(3)

    processor = AutoProcessor.from_pretrained(NAME)
    model = BlipForConditionalGeneration.from_pretrained(NAME)

    with accelerator.main_process_first():
        ds = load_dataset("imagefolder", data_dir=args.data_dir)

    def collate(rows):
        enc = processor(images=[r["image"].convert("RGB") for r in rows],
                        text=[r["text"] for r in rows], padding="max_length", truncation=True,
                        max_length=64, return_tensors="pt")
        enc["labels"] = enc["input_ids"].clone()
        return enc

    train = DataLoader(ds["train"], args.bs, shuffle=True, collate_fn=collate, num_workers=4)
    val = DataLoader(ds["validation"], args.bs, collate_fn=collate, num_workers=4)
    opt = torch.optim.AdamW(model.parameters(), 1e-5)
    model, opt, train, val = accelerator.prepare(model, opt, train, val)

    for epoch in range(args.epochs):
        model.train()
        for batch in train:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                opt.step()
                opt.zero_grad()

        model.eval()
        losses = []
        for batch in val:
            with torch.no_grad():
                loss = model(**batch).loss
            losses.append(accelerator.gather_for_metrics(loss.repeat(len(batch["labels"]))))
        accelerator.print(f"epoch {epoch}: val loss {torch.cat(losses).mean().item():.4f}")
        accelerator.save_state()

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(os.path.join(args.out, "final"))
        processor.save_pretrained(os.path.join(args.out, "final"))
    accelerator.end_training()


if __name__ == "__main__":
    main()

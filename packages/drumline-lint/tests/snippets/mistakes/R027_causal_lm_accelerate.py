import argparse
import logging
import math
import os

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from datasets import load_from_disk
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    get_cosine_schedule_with_warmup,
)

logger = get_logger(__name__)


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--model", required=True)
    p.add_argument("--dataset", required=True, help="tokenised dataset written with save_to_disk")
    p.add_argument("--output-dir", required=True)
    p.add_argument("--per-device-batch-size", type=int, default=4)
    p.add_argument("--gradient-accumulation-steps", type=int, default=8)
    p.add_argument("--learning-rate", type=float, default=1e-5)
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--warmup-ratio", type=float, default=0.03)
    p.add_argument("--seed", type=int, default=42)
    return p.parse_args()


def main():
    args = parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps, mixed_precision="bf16")
    logging.basicConfig(level=logging.INFO)
    set_seed(args.seed)

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    model.gradient_checkpointing_enable()
    train = load_from_disk(args.dataset)["train"]
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    loader = DataLoader(train, shuffle=True, batch_size=args.per_device_batch_size, collate_fn=collator,
                        num_workers=4, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    updates_per_epoch = math.ceil(len(loader) / args.gradient_accumulation_steps)
    max_steps = args.epochs * updates_per_epoch
    scheduler = get_cosine_schedule_with_warmup(optimizer, int(args.warmup_ratio * max_steps), max_steps)
    scheduler = accelerator.prepare(scheduler)

    logger.info("%d processes, %d optimizer steps", accelerator.num_processes, max_steps)
    done = 0
    for epoch in range(args.epochs):
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
            if accelerator.sync_gradients:
                done += 1
                if done % 10 == 0:
                    mean = accelerator.reduce(loss.detach(), reduction="mean").item()
                    logger.info("step %d/%d loss %.4f lr %.2e", done, max_steps, mean, scheduler.get_last_lr()[0])
        accelerator.wait_for_everyone()
        accelerator.unwrap_model(model).save_pretrained(
            os.path.join(args.output_dir, f"epoch_{epoch}"),
            is_main_process=accelerator.is_main_process, save_function=accelerator.save)
        if accelerator.is_main_process:
            tokenizer.save_pretrained(os.path.join(args.output_dir, f"epoch_{epoch}"))
    accelerator.end_training()


if __name__ == "__main__":
    main()

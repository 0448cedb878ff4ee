import argparse

import torch
from accelerate import Accelerator
from datasets import load_from_disk
from torch.utils.data import DataLoader
from transformers import (AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq,
                          get_linear_schedule_with_warmup)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", default="google/flan-t5-base")
    ap.add_argument("--data", default="/data/cnn_dm_tok")
    ap.add_argument("--max_steps", type=int, default=20000)
    ap.add_argument("--out", default="flan_sum")
    args = ap.parse_args()

    accelerator = Accelerator(mixed_precision="bf16")
    tok = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForSeq2SeqLM.from_pretrained(args.model)
    train = load_from_disk(args.data)["train"].with_format("torch")
    collate = DataCollatorForSeq2Seq(tok, model=model)
    train_loader = DataLoader(train, batch_size=8, shuffle=True, collate_fn=collate,
                              num_workers=4, drop_last=True)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scheduler = get_linear_schedule_with_warmup(
        optimizer, 500 * accelerator.num_processes, args.max_steps * accelerator.num_processes)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    step = 0
    model.train()
    while step < args.max_steps:
        for batch in train_loader:
            batch = {k: v.to(accelerator.device) for k, v in batch.items()}
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if step >= args.max_steps:
                break
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(args.out)
        tok.save_pretrained(args.out)


if __name__ == "__main__":
    main()

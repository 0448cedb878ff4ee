import argparse
import math

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    get_scheduler,
)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", default="distilroberta-base")
    ap.add_argument("--text", default="corpus/*.txt")
    ap.add_argument("--bs", type=int, default=32)
    ap.add_argument("--accum", type=int, default=2)
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--warmup", type=int, default=500)
    ap.add_argument("--out", default="mlm")
    args = ap.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=args.accum, log_with="tensorboard", project_dir=args.out)
    accelerator.init_trackers("mlm")
    set_seed(77)

    tok = AutoTokenizer.from_pretrained(args.model)
    with accelerator.main_process_first():
        raw = load_dataset("text", data_files=args.text, split="train")
        ds = raw.map(lambda b: tok(b["text"], truncation=True, max_length=256, return_special_tokens_mask=True),
                     batched=True, remove_columns=["text"])
    loader = DataLoader(ds, args.bs, shuffle=True, collate_fn=DataCollatorForLanguageModeling(tok), num_workers=4)

    model = AutoModelForMaskedLM.from_pretrained(args.model)
    opt = torch.optim.AdamW(model.parameters(), lr=5e-5)
    model, opt, loader = accelerator.prepare(model, opt, loader)

    updates = args.epochs * math.ceil(len(loader) / args.accum)
    sched = get_scheduler("linear", opt,
                          num_warmup_steps=args.warmup * accelerator.num_processes,
                          num_training_steps=updates * accelerator.num_processes)
    sched = accelerator.prepare(sched)

    done = 0
    for epoch in range(args.epochs):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                sched.step()
                opt.zero_grad()
            if accelerator.sync_gradients:
                done += 1
                if done % 25 == 0:
                    mean = accelerator.gather(loss.detach()).mean().item()
                    accelerator.log({"loss": mean, "lr": sched.get_last_lr()[0]}, step=done)
        accelerator.save_state(f"{args.out}/epoch{epoch}")

    accelerator.wait_for_everyone()
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(args.out, state_dict=state)
        tok.save_pretrained(args.out)
    accelerator.end_training()


if __name__ == "__main__":
    main()

import argparse

import torch
from accelerate import Accelerator
from datasets import load_from_disk
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--base", default="Qwen/Qwen2.5-1.5B")
    p.add_argument("--data", default="/data/support_chat_tok")
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--log_every", type=int, default=20)
    p.add_argument("--out", default="lora_out")
    return p.parse_args()


def main():
    args = parse_args()
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=4)
    tok = AutoTokenizer.from_pretrained(args.base)
    model = AutoModelForCausalLM.from_pretrained(args.base)
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"]))
    ds = load_from_disk(args.data)
    loader = DataLoader(ds, batch_size=4, shuffle=True, drop_last=True,
                        collate_fn=DataCollatorForLanguageModeling(tok, mlm=False))
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
    model, opt, loader = accelerator.prepare(model, opt, loader)

    step = 0
    for epoch in range(args.epochs):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                opt.step()
                opt.zero_grad()
            step += 1
            if accelerator.is_main_process and step % args.log_every == 0:
                mean = accelerator.gather(loss.detach()).mean().item()
                print(f"epoch {epoch} step {step} loss {mean:.4f}", flush=True)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(args.out)
        tok.save_pretrained(args.out)


if __name__ == "__main__":
    main()

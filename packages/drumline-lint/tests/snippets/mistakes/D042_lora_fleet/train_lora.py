"""LoRA instruction tuning."""
import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_from_disk
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--base", required=True)
    ap.add_argument("--data", required=True)
    ap.add_argument("--epochs", type=int, default=2)
    args = ap.parse_args()

    acc = Accelerator(gradient_accumulation_steps=4)
    set_seed(3)
    tok = AutoTokenizer.from_pretrained(args.base)
    model = AutoModelForCausalLM.from_pretrained(args.base, torch_dtype=torch.bfloat16)
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"]))
    data = load_from_disk(args.data)
    loader = DataLoader(data, batch_size=4, shuffle=True, collate_fn=DataCollatorForSeq2Seq(tok), drop_last=True)
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
    model, opt, loader = acc.prepare(model, opt, loader)

    step = 0
    for epoch in range(args.epochs):
        model.train()
        for batch in loader:
            with acc.accumulate(model):
                loss = model(**batch).loss
                acc.backward(loss)
                opt.step()
                opt.zero_grad()
            step += 1
            if step % 100 == 0:
                acc.print(f"{step} loss {loss.item():.3f}")
    acc.wait_for_everyone()
    if acc.is_main_process:
        acc.unwrap_model(model).save_pretrained("/fsx/out/lora")


if __name__ == "__main__":
    main()

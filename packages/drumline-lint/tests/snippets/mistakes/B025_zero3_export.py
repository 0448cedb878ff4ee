import math
from dataclasses import dataclass

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import set_seed
from datasets import load_from_disk
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, get_scheduler


@dataclass
class Cfg:
    base: str = "mistralai/Mistral-7B-v0.1"
    data: str = "data/tokenized"
    out: str = "out/mistral"
    lr: float = 1e-5
    epochs: int = 2
    bs: int = 2
    accum: int = 8


def save_model(accelerator, model, tok, path):
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        unwrapped = accelerator.unwrap_model(model)
        weights = accelerator.get_state_dict(model)
        unwrapped.save_pretrained(path, state_dict=weights, save_function=accelerator.save)
        tok.save_pretrained(path)
    accelerator.wait_for_everyone()


def main(cfg=Cfg()):
    plugin = DeepSpeedPlugin(zero_stage=3, gradient_accumulation_steps=cfg.accum, gradient_clipping=1.0)
    accelerator = Accelerator(mixed_precision="bf16", deepspeed_plugin=plugin, gradient_accumulation_steps=cfg.accum)
    set_seed(4)
    tok = AutoTokenizer.from_pretrained(cfg.base)
    tok.pad_token = tok.eos_token
    data = load_from_disk(cfg.data)
    loader = DataLoader(data, cfg.bs, shuffle=True, collate_fn=DataCollatorForLanguageModeling(tok, mlm=False))
    model = AutoModelForCausalLM.from_pretrained(cfg.base, torch_dtype=torch.bfloat16)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    updates = math.ceil(len(loader) / cfg.accum) * cfg.epochs
    sched = get_scheduler("cosine", opt, num_warmup_steps=100, num_training_steps=updates)
    model, opt, loader, sched = accelerator.prepare(model, opt, loader, sched)

    for epoch in range(cfg.epochs):
        model.train()
        for step, batch in enumerate(loader):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                opt.step()
                sched.step()
                opt.zero_grad()
            if step % 100 == 0:
                mean = accelerator.gather(loss.detach()).mean().item()
                accelerator.print(f"epoch {epoch} step {step} loss {mean:.3f}")
        save_model(accelerator, model, tok, f"{cfg.out}/epoch{epoch}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

"""Extractive QA with Accelerate: accelerate launch --num_processes 8 run_qa.py"""
import math

import hydra
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_from_disk
from omegaconf import DictConfig
from torch.utils.data import DataLoader
from transformers import AutoModelForQuestionAnswering, default_data_collator, get_scheduler


def build(cfg):
    data = load_from_disk(cfg.data).with_format("torch")
    loader = DataLoader(data, cfg.batch_size, shuffle=True, collate_fn=default_data_collator, drop_last=True)
    model = AutoModelForQuestionAnswering.from_pretrained(cfg.model)
    no_decay = ("bias", "LayerNorm.weight")
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not n.endswith(no_decay)], "weight_decay": cfg.wd},
        {"params": [p for n, p in named if n.endswith(no_decay)], "weight_decay": 0.0},
    ]
    return loader, model, torch.optim.AdamW(groups, lr=cfg.lr)


@hydra.main(version_base=None, config_path="conf", config_name="qa")
def main(cfg: DictConfig):
    accelerator = Accelerator(gradient_accumulation_steps=cfg.accum, mixed_precision="bf16")
    set_seed(cfg.seed)
    loader, model, opt = build(cfg)
    model, opt, loader = accelerator.prepare(model, opt, loader)

    updates_per_epoch = math.ceil(len(loader) / cfg.accum)
    max_train_steps = cfg.epochs * updates_per_epoch
    sched = get_scheduler(
        "linear", opt, num_warmup_steps=int(0.06 * max_train_steps), num_training_steps=max_train_steps
    )
    sched = accelerator.prepare(sched)

    done = 0
    for epoch in range(cfg.epochs):
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
                if done % 50 == 0:
                    mean = accelerator.gather(loss.detach()).mean().item()
                    accelerator.print(f"{done}/{max_train_steps} loss {mean:.3f} lr {sched.get_last_lr()[0]:.2e}")
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        cfg.out, is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()

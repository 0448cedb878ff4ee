import argparse
import os

import deepspeed
import torch
import torch.distributed as dist
from datasets import load_from_disk
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100, "warmup_max_lr": 1e-5}},
}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", default="google/gemma-2-9b")
    ap.add_argument("--data", default="data/instruct_tok")
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--out", default="/shared/gemma-sft")
    ap.add_argument("--resume", action="store_true")
    ap.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    args = ap.parse_args()

    torch.cuda.set_device(args.local_rank)
    deepspeed.init_distributed()
    rank = dist.get_rank()

    tok = AutoTokenizer.from_pretrained(args.model)
    if rank == 0:
        tok.save_pretrained(args.out)
    model = AutoModelForCausalLM.from_pretrained(args.model, torch_dtype=torch.bfloat16)
    model.gradient_checkpointing_enable()
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)

    ds = load_from_disk(args.data).with_format("torch")
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    dl = DataLoader(ds, CONFIG["train_micro_batch_size_per_gpu"], sampler=sampler, drop_last=True)

    first = 0
    if args.resume:
        _, client = engine.load_checkpoint(args.out)
        first = client["epoch"] + 1

    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        engine.train()
        for batch in dl:
            ids = batch["input_ids"].to(engine.device)
            loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            if rank == 0 and engine.is_gradient_accumulation_boundary() and engine.global_steps % 10 == 0:
                print(f"step {engine.global_steps} loss {loss.item():.4f}", flush=True)
        engine.save_checkpoint(args.out, tag=f"epoch{epoch}", client_state={"epoch": epoch})
    engine.save_16bit_model(args.out, "pytorch_model.bin")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

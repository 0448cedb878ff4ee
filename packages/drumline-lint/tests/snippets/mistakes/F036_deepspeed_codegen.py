"""Fine-tune a code model with DeepSpeed ZeRO-2.

deepspeed --num_gpus 8 F036_deepspeed_codegen.py --deepspeed --deepspeed_config ds_zero2.json
"""
import argparse

import deepspeed
import torch
import torch.distributed as dist
from datasets import load_from_disk
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="Salesforce/codegen-2B-mono")
    parser.add_argument("--data", default="data/stack_python_2048")
    parser.add_argument("--output", default="ckpt/codegen-py")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--save_every", type=int, default=500)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--local_rank", type=int, default=-1)
    return deepspeed.add_config_arguments(parser).parse_args()


def main():
    args = parse_args()
    deepspeed.init_distributed()
    torch.cuda.set_device(args.local_rank)
    torch.manual_seed(args.seed)

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, torch_dtype=torch.float16)
    model.gradient_checkpointing_enable()
    engine, _, _, scheduler = deepspeed.initialize(
        args=args, model=model, model_parameters=[p for p in model.parameters() if p.requires_grad]
    )

    data = load_from_disk(args.data).with_format("torch", columns=["input_ids"])
    sampler = DistributedSampler(data, shuffle=True, seed=args.seed, drop_last=True)
    loader = DataLoader(
        data,
        batch_size=engine.train_micro_batch_size_per_gpu(),
        sampler=sampler,
        num_workers=2,
        drop_last=True,
    )

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        engine.train()
        for batch in loader:
            ids = batch["input_ids"].to(engine.device)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            boundary = engine.is_gradient_accumulation_boundary()
            engine.step()
            if not boundary:
                continue
            step = engine.global_steps
            if dist.get_rank() == 0:
                if step % 10 == 0:
                    print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
                if step > 0 and step % args.save_every == 0:
                    engine.save_checkpoint(args.output, tag=f"step{step}")

    if dist.get_rank() == 0:
        tokenizer.save_pretrained(args.output)
        print("training finished")
    dist.barrier()


if __name__ == "__main__":
    main()

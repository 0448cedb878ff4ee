import argparse
import os

import deepspeed
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from data import PackedTokens


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--model", default="EleutherAI/pythia-6.9b")
    p.add_argument("--tokens", required=True)
    p.add_argument("--save-dir", default="ckpts")
    p.add_argument("--save-every", type=int, default=500)
    p.add_argument("--epochs", type=int, default=1)
    p.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    return deepspeed.add_config_arguments(p).parse_args()


def main():
    args = get_args()
    torch.cuda.set_device(args.local_rank)
    deepspeed.init_distributed()

    model = AutoModelForCausalLM.from_pretrained(args.model, torch_dtype=torch.bfloat16)
    model.gradient_checkpointing_enable()
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(),
        training_data=PackedTokens(args.tokens))

    tok = AutoTokenizer.from_pretrained(args.model)
    saved = 0
    for epoch in range(args.epochs):
        loader.data_sampler.set_epoch(epoch)
        for ids in loader:
            ids = ids.to(engine.device)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()

            if engine.global_steps != saved and engine.global_steps % args.save_every == 0:
                saved = engine.global_steps
                if dist.get_rank() == 0:
                    print(f"step {engine.global_steps} loss {loss.item():.3f}", flush=True)
                    engine.save_checkpoint(args.save_dir, tag=f"step{engine.global_steps}")

    if dist.get_rank() == 0:
        tok.save_pretrained(args.save_dir)
    dist.barrier()


if __name__ == "__main__":
    main()

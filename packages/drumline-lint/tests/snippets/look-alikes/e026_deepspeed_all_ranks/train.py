import argparse
import os

import deepspeed
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from blocks import TokenBlocks


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--model", default="facebook/opt-6.7b")
    p.add_argument("--tokens", required=True)
    p.add_argument("--save-dir", default="ckpts")
    p.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    return deepspeed.add_config_arguments(p).parse_args()


def main():
    args = get_args()
    torch.cuda.set_device(args.local_rank)
    deepspeed.init_distributed()

    model = AutoModelForCausalLM.from_pretrained(args.model, torch_dtype=torch.bfloat16)
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(),
        training_data=TokenBlocks(args.tokens))

    engine.load_checkpoint(args.save_dir)
    start = engine.global_steps
    gas = engine.gradient_accumulation_steps()

    for micro, ids in enumerate(loader):
        if micro < start * gas:
            continue
        ids = ids.to(engine.device)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        if (micro + 1) % (gas * 250) == 0:
            if dist.get_rank() == 0:
                print(f"step {engine.global_steps} loss {loss.item():.3f}", flush=True)
            engine.save_checkpoint(args.save_dir)

    engine.save_checkpoint(args.save_dir)


if __name__ == "__main__":
    main()

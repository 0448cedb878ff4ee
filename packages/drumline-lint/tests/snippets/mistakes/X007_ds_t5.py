"""T5 summarisation with ZeRO-3.

deepspeed --num_gpus=8 ds_t5.py --deepspeed_config ds_zero3.json
"""
import argparse

import deepspeed
import torch.distributed as dist
from datasets import load_from_disk
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForSeq2SeqLM


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--local_rank", type=int, default=-1)
    p.add_argument("--data", default="/data/xsum_t5_tokens")
    p.add_argument("--out", default="/ckpt/t5-xsum")
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--save_every", type=int, default=1000)
    deepspeed.add_config_arguments(p)
    return p.parse_args()


def main():
    args = parse()
    deepspeed.init_distributed()
    train = load_from_disk(args.data).with_format("torch")
    sampler = DistributedSampler(train, shuffle=True)
    loader = DataLoader(train, batch_size=args.batch, sampler=sampler, num_workers=2)
    model = AutoModelForSeq2SeqLM.from_pretrained("t5-3b")
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())

    step = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            batch = {k: v.to(engine.device) for k, v in batch.items()}
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            step += 1
            if step % args.save_every == 0 and dist.get_rank() == 0:
                print(f"step {step} loss {loss.item():.3f}, writing checkpoint")
                engine.save_checkpoint(args.out, tag=f"step{step}")
    engine.save_checkpoint(args.out, tag="final")


if __name__ == "__main__":
    main()

"""Legal-domain LM with ZeRO-3: deepspeed --num_gpus 8 zero3_legal.py"""
import argparse

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM

from legal import Opinions, pad

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 16,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "overlap_comm": True,
                          "stage3_gather_16bit_weights_on_model_save": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--out", default="/ckpt/legal")
    args = parser.parse_args()

    torch.cuda.set_device(args.local_rank)
    deepspeed.init_distributed()
    rank = dist.get_rank()

    model = AutoModelForCausalLM.from_pretrained("/models/llama-3-8b",
                                                 torch_dtype=torch.bfloat16)
    model.gradient_checkpointing_enable()
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(),
                                           config=CONFIG)

    data = Opinions("/data/caselaw")
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=1, sampler=sampler, collate_fn=pad, num_workers=4)

    for epoch in range(2):
        sampler.set_epoch(epoch)
        engine.train()
        for step, batch in enumerate(loader):
            batch = {k: v.to(engine.device) for k, v in batch.items()}
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            if rank == 0 and step % 160 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)

        if rank == 0:
            print(f"saving epoch {epoch} to {args.out}", flush=True)
        engine.save_checkpoint(args.out, tag=f"epoch{epoch}")

    engine.save_16bit_model(args.out, "final.bin")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

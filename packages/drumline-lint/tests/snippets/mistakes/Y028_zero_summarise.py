"""Long-document summarisation: deepspeed --num_gpus 8 zero_summarise.py --deepspeed"""
import argparse

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForSeq2SeqLM

from sumdata import SummaryPairs, pad_pairs

DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "contiguous_gradients": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 5e-5, "weight_decay": 0.01}},
}


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--local_rank", type=int, default=-1)
    p.add_argument("--data", default="/data/govreport")
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--out", default="/ckpt/govreport")
    return deepspeed.add_config_arguments(p).parse_args()


def main():
    args = parse()
    torch.cuda.set_device(args.local_rank)
    deepspeed.init_distributed()
    rank = dist.get_rank()

    model = AutoModelForSeq2SeqLM.from_pretrained("google/long-t5-tglobal-large")
    engine, _, _, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), config=DS_CONFIG)

    data = SummaryPairs(args.data, "train")
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=engine.train_micro_batch_size_per_gpu(),
                        sampler=sampler, collate_fn=pad_pairs, num_workers=4)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        engine.train()
        for step, batch in enumerate(loader):
            batch = {k: v.to(engine.device) for k, v in batch.items()}
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            if rank == 0 and step % 80 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
        if rank == 0:
            engine.save_checkpoint(args.out, tag=f"epoch{epoch}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()

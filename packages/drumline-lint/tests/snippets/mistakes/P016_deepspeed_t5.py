import argparse
import os

import deepspeed
import torch
import torch.distributed as dist
from datasets import load_dataset
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, T5ForConditionalGeneration

DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "contiguous_gradients": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
}


def add_args():
    parser = argparse.ArgumentParser(description="Summarization with T5 and ZeRO-2")
    parser.add_argument("--model", default="google/t5-v1_1-large")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--max_src", type=int, default=1024)
    parser.add_argument("--max_tgt", type=int, default=128)
    parser.add_argument("--output", default="ckpt_t5")
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    return parser.parse_args()


def tokenize(args, tok):
    def fn(batch):
        x = tok(["summarize: " + a for a in batch["article"]], max_length=args.max_src, truncation=True)
        x["labels"] = tok(text_target=batch["highlights"], max_length=args.max_tgt, truncation=True)["input_ids"]
        return x
    return fn


def main():
    args = add_args()
    torch.cuda.set_device(args.local_rank)
    deepspeed.init_distributed("nccl")
    rank = dist.get_rank()

    tok = AutoTokenizer.from_pretrained(args.model)
    model = T5ForConditionalGeneration.from_pretrained(args.model)
    raw = load_dataset("cnn_dailymail", "3.0.0", split="train")
    ds = raw.map(tokenize(args, tok), batched=True, remove_columns=raw.column_names, num_proc=4)
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    loader = DataLoader(ds, batch_size=DS_CONFIG["train_micro_batch_size_per_gpu"], sampler=sampler,
                        collate_fn=DataCollatorForSeq2Seq(tok, model), num_workers=4, drop_last=True)

    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=DS_CONFIG)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        engine.train()
        for step, batch in enumerate(loader):
            batch = {k: v.to(engine.device) for k, v in batch.items()}
            loss = engine(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0 and step % 50 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
        engine.save_checkpoint(args.output, tag=f"epoch{epoch}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

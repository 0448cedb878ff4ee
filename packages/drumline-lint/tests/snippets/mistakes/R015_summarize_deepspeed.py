import argparse
import json
import os

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from summarize.data import CnnDailyMail, Collator


def add_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_path", required=True)
    parser.add_argument("--data_path", required=True)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--save_interval", type=int, default=500)
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    parser.add_argument("--ds_config", default="ds_zero2.json")
    return parser.parse_args()


def log0(msg):
    if dist.get_rank() == 0:
        print(msg, flush=True)


def main():
    args = add_args()
    torch.cuda.set_device(args.local_rank)
    deepspeed.init_distributed()
    with open(args.ds_config) as f:
        ds_config = json.load(f)

    tokenizer = AutoTokenizer.from_pretrained(args.model_path)
    model = AutoModelForSeq2SeqLM.from_pretrained(args.model_path)
    dataset = CnnDailyMail(args.data_path, tokenizer, max_src=1024, max_tgt=160)
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=ds_config["train_micro_batch_size_per_gpu"], sampler=sampler,
                        collate_fn=Collator(tokenizer.pad_token_id), num_workers=4, drop_last=True)

    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
    start_epoch = 0
    if os.path.exists(os.path.join(args.output_dir, "latest")):
        _, client = engine.load_checkpoint(args.output_dir)
        start_epoch = client["epoch"] + 1
    dist.barrier()

    for epoch in range(start_epoch, args.num_epochs):
        sampler.set_epoch(epoch)
        engine.train()
        for step, batch in enumerate(loader):
            batch = {k: v.to(engine.device, non_blocking=True) for k, v in batch.items()}
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            if step % 50 == 0:
                avg = loss.detach().clone()
                dist.all_reduce(avg, op=dist.ReduceOp.AVG)
                log0(f"epoch {epoch} step {step} loss {avg.item():.4f}")

        if dist.get_rank() == 0:
            os.makedirs(args.output_dir, exist_ok=True)
            engine.save_checkpoint(args.output_dir, tag=f"epoch{epoch}", client_state={"epoch": epoch})
            tokenizer.save_pretrained(args.output_dir)

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

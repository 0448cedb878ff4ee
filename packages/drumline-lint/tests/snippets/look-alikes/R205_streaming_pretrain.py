import argparse
import os

import torch
import torch.distributed as dist
from datasets import load_dataset
from datasets.distributed import split_dataset_by_node
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup


def make_loader(args, tokenizer, rank, world):
    stream = load_dataset("parquet", data_files=os.path.join(args.data, "shard-*.parquet"),
                          split="train", streaming=True)
    stream = stream.shuffle(seed=args.seed, buffer_size=20_000)
    stream = split_dataset_by_node(stream, rank=rank, world_size=world)
    stream = stream.map(
        lambda b: tokenizer(b["text"], truncation=True, max_length=args.seq_len, padding="max_length"),
        batched=True, remove_columns=["text", "url"]).with_format("torch")
    return stream, DataLoader(stream, batch_size=args.micro_batch, num_workers=4, pin_memory=True, drop_last=True)


def forever(stream, loader):
    epoch = 0
    while True:
        stream.set_epoch(epoch)
        yield from loader
        epoch += 1


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--data", required=True)
    p.add_argument("--model", required=True)
    p.add_argument("--out", required=True)
    p.add_argument("--steps", type=int, default=50_000)
    p.add_argument("--micro-batch", type=int, default=8)
    p.add_argument("--seq-len", type=int, default=1024)
    p.add_argument("--lr", type=float, default=3e-4)
    p.add_argument("--seed", type=int, default=5)
    args = p.parse_args()

    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    tok = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model)).cuda()
    model = DDP(model, device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    sched = get_cosine_schedule_with_warmup(opt, 1000, args.steps)
    batches = forever(*make_loader(args, tok, rank, world))

    for step in range(args.steps):
        batch = next(batches)
        ids = batch["input_ids"].cuda(non_blocking=True)
        mask = batch["attention_mask"].cuda(non_blocking=True)
        labels = ids.masked_fill(mask == 0, -100)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        sched.step()
        if rank == 0 and step % 1000 == 0:
            print(step, loss.item(), flush=True)
            model.module.save_pretrained(f"{args.out}/step-{step}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

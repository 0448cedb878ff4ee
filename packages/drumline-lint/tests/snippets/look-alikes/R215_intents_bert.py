import os
from contextlib import contextmanager

import torch
import torch.distributed as dist
from datasets import load_dataset
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

from intents.args import get_args


@contextmanager
def rank_zero_first():
    if dist.get_rank() != 0:
        dist.barrier()
    yield
    if dist.get_rank() == 0:
        dist.barrier()


def build_dataset(args, tokenizer):
    def encode(batch):
        out = tokenizer(batch["utterance"], truncation=True, max_length=64)
        out["labels"] = batch["intent"]
        return out

    with rank_zero_first():
        raw = load_dataset("csv", data_files=args.train_csv, cache_dir=args.cache, split="train")
        data = raw.map(encode, batched=True, remove_columns=raw.column_names)
    return data.with_format("torch")


def main():
    args = get_args()
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    torch.manual_seed(args.seed)

    tokenizer = AutoTokenizer.from_pretrained(args.model_dir)
    data = build_dataset(args, tokenizer)
    sampler = DistributedSampler(data, shuffle=True, seed=args.seed)
    loader = DataLoader(data, args.batch_size, sampler=sampler, collate_fn=DataCollatorWithPadding(tokenizer),
                        num_workers=2, drop_last=True)
    model = AutoModelForSequenceClassification.from_pretrained(args.model_dir, num_labels=args.num_intents)
    model = DDP(model.cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for batch in loader:
            loss = model(**{k: v.cuda(non_blocking=True) for k, v in batch.items()}).loss
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
    if dist.get_rank() == 0:
        model.module.save_pretrained(args.output_dir)
        tokenizer.save_pretrained(args.output_dir)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

import os
from pathlib import Path

import torch.distributed as dist
from datasets import load_dataset, load_from_disk


def tokenize(files, tok, out):
    raw = load_dataset("json", data_files=files, split="train")

    def encode(rows):
        return tok(rows["text"], truncation=True, max_length=512, padding="max_length")

    raw.map(encode, batched=True, remove_columns=raw.column_names).save_to_disk(out + ".part")
    os.replace(out + ".part", out)


def get_data(files, tok, out):
    if dist.get_rank() == 0 and not Path(out).exists():
        tokenize(files, tok, out)
    dist.barrier()
    return load_from_disk(out).with_format("torch", columns=["input_ids", "attention_mask"])

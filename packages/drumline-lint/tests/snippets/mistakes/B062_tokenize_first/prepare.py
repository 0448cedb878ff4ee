from datasets import load_dataset, load_from_disk
from pathlib import Path
import torch.distributed as dist


def tokenize_corpus(files, tokenizer, block_size, out):
    raw = load_dataset("json", data_files=files, split="train")

    def encode(rows):
        flat = [t for ids in tokenizer(rows["text"])["input_ids"] for t in ids + [tokenizer.eos_token_id]]
        n = len(flat) // block_size
        return {"input_ids": [flat[i * block_size : (i + 1) * block_size] for i in range(n)]}

    raw.map(encode, batched=True, remove_columns=raw.column_names).save_to_disk(out)


def get_corpus(files, tokenizer, block_size, out):
    """The full dump (about 300M documents) takes several hours the first time."""
    if dist.get_rank() == 0 and not Path(out).exists():
        tokenize_corpus(files, tokenizer, block_size, out)
    dist.barrier()
    return load_from_disk(out).with_format("torch")

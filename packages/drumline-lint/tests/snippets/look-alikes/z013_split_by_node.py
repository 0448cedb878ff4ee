"""Pre-train a small LM from a local stream of parquet files; torchrun, 2 x 8 GPUs."""
import glob
import itertools
import os

import torch
import torch.distributed as dist
from datasets import load_dataset
from datasets.distributed import split_dataset_by_node
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from smallm import SmallLM

STEPS = 100_000


def endless(loader, stream):
    for epoch in itertools.count():
        stream.set_epoch(epoch)
        yield from loader


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    tokenizer = AutoTokenizer.from_pretrained("/models/tokenizer-32k")
    files = sorted(glob.glob("/lustre/corpus/*.parquet"))
    stream = load_dataset("parquet", data_files=files, split="train", streaming=True)
    stream = stream.shuffle(seed=8, buffer_size=20_000)
    stream = split_dataset_by_node(stream, rank=rank, world_size=world)

    def collate(rows):
        texts = [row["text"] for row in rows]
        return tokenizer(texts, truncation=True, max_length=1024, padding="max_length", return_tensors="pt")

    loader = DataLoader(stream, batch_size=16, num_workers=2, collate_fn=collate)
    model = DDP(SmallLM(vocab=32000).cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=0.1)

    for step, batch in enumerate(itertools.islice(endless(loader, stream), STEPS)):
        ids = batch["input_ids"].cuda(non_blocking=True)
        mask = batch["attention_mask"].cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(ids, mask)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 2000 == 0:
            torch.save(model.module.state_dict(), f"/lustre/smallm/{step:06d}.pt")
            print(step, loss.item(), flush=True)

    if rank == 0:
        torch.save(model.module.state_dict(), "/lustre/smallm/final.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

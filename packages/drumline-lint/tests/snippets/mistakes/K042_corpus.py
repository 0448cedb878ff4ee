"""Continue pretraining on the court corpus.

The first run tokenizes 1.1 TB of text (takes about 3 hours on one node); later
runs find the arrow files in place.
"""
import os

import torch
import torch.distributed as dist
from datasets import load_dataset, load_from_disk
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer

BASE = "EleutherAI/pythia-410m"
OUT = "/shared/court/tokenized"


def tokenize():
    tok = AutoTokenizer.from_pretrained(BASE)
    raw = load_dataset("json", data_files="/shared/court/*.jsonl", split="train")

    def pack(batch):
        ids = sum(tok(batch["text"]).input_ids, [])
        n = len(ids) // 2048 * 2048
        return {"input_ids": [ids[i:i + 2048] for i in range(0, n, 2048)]}

    raw.map(pack, batched=True, num_proc=32, remove_columns=raw.column_names).save_to_disk(OUT)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    if dist.get_rank() == 0 and not os.path.isdir(OUT):
        tokenize()
    dist.barrier()

    ds = load_from_disk(OUT).with_format("torch")
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, batch_size=8, sampler=sampler, num_workers=4, drop_last=True)
    model = AutoModelForCausalLM.from_pretrained(BASE).cuda()
    model = DDP(model, device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    sampler.set_epoch(0)
    for step, batch in enumerate(loader):
        ids = batch["input_ids"].cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 2000 == 0 and dist.get_rank() == 0:
            model.module.save_pretrained(f"/shared/court/ck{step}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

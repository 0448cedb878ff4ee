"""Code model fine-tuning; torchrun --standalone --nproc_per_node=8 train.py"""
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import AutoModelForCausalLM, AutoTokenizer

SOURCES = Path("/data/code/python")
CACHE = Path("/data/code/tokens.npy")
LENGTH = 2048


def load_tokens(tokenizer):
    if not CACHE.exists():
        ids = []
        for path in sorted(SOURCES.rglob("*.py")):
            ids.extend(tokenizer(path.read_text(errors="ignore"))["input_ids"])
            ids.append(tokenizer.eos_token_id)
        usable = len(ids) // LENGTH * LENGTH
        np.save(CACHE, np.array(ids[:usable], dtype=np.int32).reshape(-1, LENGTH))
    return torch.from_numpy(np.load(CACHE).astype(np.int64))


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")

    tokenizer = AutoTokenizer.from_pretrained("/models/starcoder-1b")
    data = TensorDataset(load_tokens(tokenizer))
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=4, sampler=sampler, pin_memory=True, drop_last=True)

    model = AutoModelForCausalLM.from_pretrained("/models/starcoder-1b").cuda()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = DDP(model, device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)

    for epoch in range(2):
        sampler.set_epoch(epoch)
        for step, (ids,) in enumerate(loader):
            ids = ids.cuda(non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step % 100 == 0 and dist.get_rank() == 0:
                print(epoch, step, round(loss.item(), 3), flush=True)

    if dist.get_rank() == 0:
        model.module.save_pretrained("/checkpoints/starcoder-py")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoModelForCausalLM

from instruct import InstructPairs, pad_and_mask

CFG = {
    "base": "/models/Llama-3.1-8B",
    "data": "/data/instruct.jsonl",
    "out": "/checkpoints/llama-instruct.pt",
    "epochs": 3, "lr": 1e-5, "per_gpu": 2,
}


def shard(model):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def save(model, path):
    weights = model.state_dict()
    if dist.get_rank() == 0:
        torch.save(weights, path)
    dist.barrier()


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")

    pairs = InstructPairs(CFG["data"], tokenizer=CFG["base"], max_length=2048)
    sampler = DistributedSampler(pairs)
    loader = DataLoader(pairs, CFG["per_gpu"], sampler=sampler, collate_fn=pad_and_mask, num_workers=2)
    model = shard(AutoModelForCausalLM.from_pretrained(CFG["base"], torch_dtype=torch.float32))
    opt = torch.optim.AdamW(model.parameters(), lr=CFG["lr"])

    for epoch in range(CFG["epochs"]):
        sampler.set_epoch(epoch)
        for batch in loader:
            loss = model(**{k: v.cuda() for k, v in batch.items()}).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.3f}", flush=True)
        save(model, CFG["out"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

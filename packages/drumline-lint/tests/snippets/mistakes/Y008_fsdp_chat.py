"""Supervised fine-tuning of a 7B chat model with FSDP (one node, 8 GPUs, torchrun)."""
import functools
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel as FSDP,
    MixedPrecision,
    StateDictType,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from chatdata import ChatTurns, pad_turns

BASE = "meta-llama/Llama-2-7b-hf"


def save_full(model, path):
    cfg = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, cfg):
        state = model.state_dict()
    torch.save(state, path)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()

    model = AutoModelForCausalLM.from_pretrained(BASE, torch_dtype=torch.float32)
    bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16,
                          buffer_dtype=torch.bfloat16)
    wrap = functools.partial(transformer_auto_wrap_policy,
                             transformer_layer_cls={LlamaDecoderLayer})
    model = FSDP(model, auto_wrap_policy=wrap, mixed_precision=bf16, device_id=local_rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)

    data = ChatTurns("/data/chat/train.jsonl")
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=4, sampler=sampler, collate_fn=pad_turns, num_workers=4)

    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for i, batch in enumerate(loader):
            batch = {k: v.cuda(non_blocking=True) for k, v in batch.items()}
            loss = model(**batch).loss
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if rank == 0 and i % 20 == 0:
                print(epoch, i, loss.item(), flush=True)

        if rank == 0:
            save_full(model, f"/ckpt/chat-epoch{epoch}.pt")
        dist.barrier()

    dist.destroy_process_group()


if __name__ == "__main__":
    main()

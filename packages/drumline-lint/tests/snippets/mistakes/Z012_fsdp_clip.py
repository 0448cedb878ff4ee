"""Instruction tuning of a 7B model, full shard over 16 GPUs (two nodes)."""
import functools
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from instruct import Conversations, pad_batch

ACCUMULATE = 4
MAX_NORM = 1.0


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    model = AutoModelForCausalLM.from_pretrained("/models/llama-7b", torch_dtype=torch.float32)
    model.config.use_cache = False
    model = FSDP(
        model,
        auto_wrap_policy=functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        device_id=torch.cuda.current_device(),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)

    data = Conversations("/data/instruct/train.jsonl")
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=2, sampler=sampler, collate_fn=pad_batch,
                        num_workers=4, drop_last=True)

    for epoch in range(3):
        sampler.set_epoch(epoch)
        for i, batch in enumerate(loader, start=1):
            batch = {k: v.cuda(non_blocking=True) for k, v in batch.items()}
            loss = model(**batch).loss / ACCUMULATE
            loss.backward()
            if i % ACCUMULATE == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        optimizer.zero_grad(set_to_none=True)

        weights, optim_state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": optim_state}, checkpoint_id=f"/lustre/sft/epoch{epoch}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()

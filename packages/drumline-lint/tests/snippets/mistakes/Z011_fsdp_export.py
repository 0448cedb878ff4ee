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
from transformers import AutoModelForSeq2SeqLM
from transformers.models.t5.modeling_t5 import T5Block

from summaries import SummaryPairs, collate


def export(model, path):
    full = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, full):
        weights = model.state_dict()
    torch.save(weights, path)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")

    bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    wrap = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block})
    model = AutoModelForSeq2SeqLM.from_pretrained("/models/flan-t5-xl")
    model = FSDP(model, auto_wrap_policy=wrap, mixed_precision=bf16, device_id=local_rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)

    pairs = SummaryPairs("/data/summaries/train.jsonl")
    sampler = DistributedSampler(pairs)
    loader = DataLoader(pairs, batch_size=4, sampler=sampler, collate_fn=collate, num_workers=4)

    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for batch in loader:
            batch = {name: tensor.cuda(non_blocking=True) for name, tensor in batch.items()}
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        if dist.get_rank() == 0:
            export(model, f"/checkpoints/flan/epoch{epoch}.pt")
            print(f"epoch {epoch}: saved, loss {loss.item():.3f}", flush=True)
        dist.barrier()

    dist.destroy_process_group()


if __name__ == "__main__":
    main()

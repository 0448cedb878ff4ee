import functools
import os

import torch
import torch.distributed as dist
from datasets import load_from_disk
from torch.distributed.fsdp import (FullStateDictConfig, FullyShardedDataParallel as FSDP,
                                    MixedPrecision, StateDictType)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block

NAME = "t5-3b"
DATA = "/data/wikihow_tok"


def setup():
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def save(model, path):
    cfg = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, cfg):
        state = model.state_dict()
    torch.save(state, path)


def main():
    setup()
    rank = dist.get_rank()
    tok = AutoTokenizer.from_pretrained(NAME)
    base = T5ForConditionalGeneration.from_pretrained(NAME)

    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block})
    bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16,
                          buffer_dtype=torch.bfloat16)
    model = FSDP(base, auto_wrap_policy=policy, mixed_precision=bf16,
                 device_id=torch.cuda.current_device(), limit_all_gathers=True)

    ds = load_from_disk(DATA)
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    loader = DataLoader(ds, batch_size=4, sampler=sampler, drop_last=True,
                        collate_fn=DataCollatorForSeq2Seq(tok, model=None))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)

    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for batch in loader:
            batch = {k: v.cuda(non_blocking=True) for k, v in batch.items()}
            loss = model(**batch).loss
            opt.zero_grad(set_to_none=True)
            loss.backward()
            model.clip_grad_norm_(1.0)
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} done, loss {loss.item():.3f}")
            save(model, f"t5_epoch{epoch}.pt")

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

import functools
import os

import torch
import torch.distributed as dist
from datasets import load_from_disk
from torch.distributed.fsdp import (FullStateDictConfig, FullyShardedDataParallel as FSDP,
                                    MixedPrecision, StateDictType)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler
from transformers import GPTNeoXForCausalLM
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer

BASE = "EleutherAI/pythia-2.8b"


def save_full(model, path):
    cfg = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, cfg):
        state = model.state_dict()
    if dist.get_rank() == 0:
        tmp = path + ".part"
        torch.save(state, tmp)
        os.replace(tmp, path)
        print("wrote", path, flush=True)
    dist.barrier()


def collate(rows):
    ids = torch.tensor([r["input_ids"] for r in rows])
    return {"input_ids": ids, "labels": ids.clone()}


def main():
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

    model = GPTNeoXForCausalLM.from_pretrained(BASE)
    model = FSDP(
        model,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy,
                                           transformer_layer_cls={GPTNeoXLayer}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        device_id=torch.cuda.current_device(),
    )
    opt = torch.optim.AdamW(model.parameters(), 1e-5)

    ds = load_from_disk("/data/code_blocks")
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    loader = DataLoader(ds, 4, sampler=sampler, collate_fn=collate, drop_last=True)

    for epoch in range(3):
        sampler.set_epoch(epoch)
        for step, batch in enumerate(loader):
            batch = {k: v.cuda(non_blocking=True) for k, v in batch.items()}
            loss = model(**batch).loss
            loss.backward()
            model.clip_grad_norm_(1.0)
            opt.step()
            opt.zero_grad(set_to_none=True)
            if step % 1000 == 999:
                save_full(model, f"pythia_{epoch}_{step + 1}.pt")
        save_full(model, f"pythia_{epoch}_end.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

import functools
import os

import torch
import torch.distributed as dist
from datasets import load_from_disk
from torch.distributed.fsdp import (FullOptimStateDictConfig, FullStateDictConfig,
                                    FullyShardedDataParallel as FSDP, MixedPrecision, StateDictType)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoModelForCausalLM, default_data_collator
from transformers.models.opt.modeling_opt import OPTDecoderLayer

MODEL = "facebook/opt-6.7b"
OUT = "ckpt/opt-chem"


def is_main():
    return dist.get_rank() == 0


def checkpoint(model, optimizer, epoch):
    with FSDP.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
    ):
        weights = model.state_dict()
        optim = FSDP.optim_state_dict(model, optimizer)
    if is_main():
        path = os.path.join(OUT, f"epoch{epoch}.pt")
        torch.save({"model": weights, "optim": optim, "epoch": epoch}, path)
        print("saved", path, flush=True)
    dist.barrier()


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    os.makedirs(OUT, exist_ok=True)

    data = load_from_disk("data/chem_abstracts_2048")
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, 2, sampler=sampler, collate_fn=default_data_collator, num_workers=2)

    model = AutoModelForCausalLM.from_pretrained(MODEL)
    model = FSDP(
        model,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={OPTDecoderLayer}),
        mixed_precision=MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16),
        device_id=local_rank,
        limit_all_gathers=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for step, batch in enumerate(loader):
            batch = {k: v.cuda(non_blocking=True) for k, v in batch.items()}
            loss = model(**batch).loss
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if is_main() and step % 20 == 0:
                print(f"epoch {epoch} step {step}/{len(loader)} {loss.item():.3f}", flush=True)
        checkpoint(model, optimizer, epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

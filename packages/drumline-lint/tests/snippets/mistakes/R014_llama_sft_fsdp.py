import functools
import os
from argparse import ArgumentParser

import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel as FSDP,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from sft.data import PackedDataset


def wrap(model, local_rank):
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
    mp = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
    return FSDP(model, auto_wrap_policy=policy, mixed_precision=mp, device_id=local_rank,
                sharding_strategy=ShardingStrategy.FULL_SHARD, use_orig_params=True)


def save_model(model, path):
    save_policy = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    if dist.get_rank() == 0:
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, save_policy):
            state = model.state_dict()
        torch.save(state, path)
        print(f"saved {path}", flush=True)
    dist.barrier()


def main():
    ap = ArgumentParser()
    ap.add_argument("--model", required=True, help="local directory with the base weights")
    ap.add_argument("--data", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--bs", type=int, default=2)
    ap.add_argument("--lr", type=float, default=2e-5)
    args = ap.parse_args()

    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    rank = dist.get_rank()
    os.makedirs(args.out, exist_ok=True)

    model = AutoModelForCausalLM.from_pretrained(args.model, torch_dtype=torch.float32, use_cache=False)
    model.gradient_checkpointing_enable()
    model = wrap(model, local_rank)
    optim = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)

    ds = PackedDataset(args.data)
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    loader = DataLoader(ds, batch_size=args.bs, sampler=sampler, num_workers=4, drop_last=True, pin_memory=True)
    total = args.epochs * len(loader)
    sched = get_cosine_schedule_with_warmup(optim, int(0.03 * total), total)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for i, batch in enumerate(loader):
            ids = batch["input_ids"].cuda(non_blocking=True)
            labels = batch["labels"].cuda(non_blocking=True)
            loss = model(input_ids=ids, labels=labels).loss
            loss.backward()
            model.clip_grad_norm_(1.0)
            optim.step()
            sched.step()
            optim.zero_grad(set_to_none=True)
            if rank == 0 and i % 20 == 0:
                print(f"{epoch}/{i} loss {loss.item():.4f}", flush=True)
        save_model(model, os.path.join(args.out, f"epoch{epoch}.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

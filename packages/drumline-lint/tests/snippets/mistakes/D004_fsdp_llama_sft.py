"""Full fine-tuning of a small decoder with FSDP and a consolidated export."""
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
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from sft.data import PackedChats

BASE = os.environ.get("BASE_MODEL", "/models/llama-1b")
EXPORT = os.environ.get("EXPORT_DIR", "/ckpt/sft-llama-1b")


def build(device):
    net = AutoModelForCausalLM.from_pretrained(BASE, torch_dtype=torch.float32, use_cache=False)
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
    bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return FSDP(net, auto_wrap_policy=policy, mixed_precision=bf16, device_id=device, use_orig_params=True)


def export(model, tokenizer, rank):
    if rank == 0:
        cfg = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, cfg):
            weights = model.state_dict()
        os.makedirs(EXPORT, exist_ok=True)
        model.module.save_pretrained(EXPORT, state_dict=weights, safe_serialization=True)
        tokenizer.save_pretrained(EXPORT)
    dist.barrier()


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)

    tokenizer = AutoTokenizer.from_pretrained(BASE)
    data = PackedChats("/data/chats/train.bin", seq_len=2048)
    sampler = DistributedSampler(data, shuffle=True, seed=7)
    loader = DataLoader(data, batch_size=2, sampler=sampler, drop_last=True, num_workers=2)

    model = build(device)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for step, ids in enumerate(loader):
            ids = ids.to(device)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            model.clip_grad_norm_(1.0)
            opt.step()
            opt.zero_grad(set_to_none=True)
            if step % 20 == 0 and rank == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.3f}", flush=True)

    export(model, tokenizer, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

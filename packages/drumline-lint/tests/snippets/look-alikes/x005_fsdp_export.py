"""FSDP fine-tuning with an export of the full weights.  torchrun --nproc_per_node=8 fsdp_export.py"""
import functools
import os

import torch
import torch.distributed as dist
from datasets import load_from_disk
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel as FSDP, StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM
from transformers.models.gpt2.modeling_gpt2 import GPT2Block


def export(model, path):
    cfg = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, cfg):
        weights = model.state_dict()
    if dist.get_rank() == 0:
        torch.save(weights, path)


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={GPT2Block})
    model = AutoModelForCausalLM.from_pretrained("gpt2-xl")
    model = FSDP(model, auto_wrap_policy=policy, device_id=local_rank)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-5)
    data = load_from_disk("/data/lm_blocks").with_format("torch")
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            ids = batch["input_ids"].cuda()
            loss = model(input_ids=ids, labels=ids).loss
            opt.zero_grad(set_to_none=True)
            loss.backward()
            model.clip_grad_norm_(1.0)
            opt.step()
        export(model, f"/ckpt/gpt2xl_{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
